"""The README's code and commands run as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(mpc-dist .*)$", README, flags=re.MULTILINE)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder with the shipped configs, so that nothing is written into the project."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    return tmp_path


def test_the_python_example_prints_what_the_readme_says(workplace: Path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(printed)


def test_the_readme_shows_commands():
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run_as_printed(command: str, workplace: Path):
    program, *arguments = shlex.split(command)
    path = Path(sys.executable).with_name(program)
    done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=240, cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert list(workplace.glob("runs/*/angles.png"))


def test_the_files_that_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
