"""The README's code and commands run as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
BASH = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = re.findall(r"^((?:mpc-dist|torchrun|accelerate|deepspeed|python) .*)$", BASH, flags=re.MULTILINE)
LOOP, GRADIENTS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the shipped configs and scripts, so that nothing is written into the project."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "launch"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(words: list[str], folder: Path) -> str:
    programs = Path(sys.executable).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WANDB_MODE": "offline"}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"  # as if .venv were activated
    environment |= {f"WANDB_{name}_DIR": str(folder / "wandb") for name in ("CONFIG", "CACHE", "DATA")}
    done = subprocess.run(
        [programs / words[0], *words[1:]], capture_output=True, text=True, timeout=240, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Reader:
    """Follows the README from its first line: a command is run once, after all that stand before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: dict[str, str] = {}

    def follow(self, command: str) -> str:
        for earlier in COMMANDS[: COMMANDS.index(command) + 1]:
            if earlier not in self._printed and (earlier == command or earlier not in HEAVY):
                self._printed[earlier] = run(shlex.split(earlier), self.folder)
        return self._printed[command]


@pytest.fixture(scope="module")
def reader(workplace: Path) -> Reader:
    return Reader(workplace)


def test_the_gradient_example_prints_what_the_readme_says(workplace: Path):
    (printed,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    assert run(["python", "-c", GRADIENTS], workplace).startswith(printed)


def test_the_loop_trains_under_torchrun(workplace: Path):
    (workplace / "my_loop.py").write_text(LOOP)
    (command,) = re.findall(r"^# (torchrun .*)$", LOOP, flags=re.MULTILINE)
    found = dict(re.findall(r"loss after block (\d): ([\d.]+)", run(shlex.split(command), workplace)))
    assert set(found) == {"3", "6"}
    assert float(found["6"]) < 0.2  # from about 0.5


def test_every_launcher_and_command_is_shown():
    shown = {tuple(shlex.split(command)[:2]) for command in COMMANDS}
    commands = {("mpc-dist", name) for name in ("angles", "plan", "schedule", "sweep", "report", "export")}
    assert commands <= shown
    assert {"torchrun", "accelerate", "deepspeed", "python"} <= {program for program, _ in shown}


HEAVY = [command for command in COMMANDS if "gpt2_xl" in command]  # half a minute and more on its own
MARKED = [pytest.param(command, marks=pytest.mark.slow if command in HEAVY else ()) for command in COMMANDS]


@pytest.mark.parametrize("command", MARKED)
def test_the_commands_run_as_printed(command: str, reader: Reader):
    assert reader.follow(command)


def test_the_printed_commands_go_on_where_the_run_stopped(reader: Reader):
    reader.follow(next(command for command in COMMANDS if command.startswith("mpc-dist export")))
    lines = read_metrics(reader.folder / "runs" / "gpt_train", 0)
    assert [line["step"] for line in lines if line["event"] == "resume"] == [100, 150]
    assert (reader.folder / "runs" / "gpt_weights" / "model.safetensors").is_file()


def test_the_files_that_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
