"""The README's code and commands run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(mpc-dist .*|torchrun .*)$", README, flags=re.MULTILINE)
LOOP, GRADIENTS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder with the shipped configs and scripts, so that nothing is written into the project."""
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(words: list[str], folder: Path) -> str:
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, timeout=240, cwd=folder, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_gradient_example_prints_what_the_readme_says(workplace: Path):
    (printed,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert run(["python", "-c", GRADIENTS], workplace).startswith(printed)


def test_the_loop_trains_under_torchrun(workplace: Path):
    (workplace / "my_loop.py").write_text(LOOP)
    (command,) = re.findall(r"^# (torchrun .*)$", LOOP, flags=re.MULTILINE)
    found = dict(re.findall(r"loss after block (\d): ([\d.]+)", run(shlex.split(command), workplace)))
    assert set(found) == {"3", "6"}
    assert float(found["6"]) < 0.2  # from about 0.5


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run_as_printed(command: str, workplace: Path):
    words = shlex.split(command)
    if "--plan" in words:
        plan = words[words.index("--plan") + 1]
        (making,) = [other for other in COMMANDS if f"--out {plan}" in other]
        run(shlex.split(making), workplace)
    assert run(words, workplace)


def test_the_files_that_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
