"""Images and cluster files: their linters have nothing to say, and they install what the Makefile installs.

Neither Docker nor a cluster is at hand in the tests: that the files are well formed is all that is shown.
"""

import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from mpc_dist.runtime.mesh import Launch, check_world
from mpc_dist.training.config import ConfigParser
from tests.conftest import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
SBATCH = ROOT / "launch" / "slurm.sbatch"
COMPOSE = ROOT / "docker" / "compose.yaml"
KUBERNETES = ROOT / "docker" / "kubernetes.yaml"

LINTERS = {
    DOCKERFILE: ["hadolint"],
    SBATCH: ["shellcheck"],
    COMPOSE: ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
    KUBERNETES: ["kubernetes-validate", "--strict"],
}


def lint(path: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    program = shutil.which(command[0], path=str(Path(sys.executable).parent)) or shutil.which(command[0])
    assert program is not None, f"{command[0]} is not installed; it is in the dev extra (make check)"
    return subprocess.run([program, *command[1:], str(path)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", LINTERS, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say(path):
    done = lint(path, LINTERS[path])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (DOCKERFILE, "FROM python:3.11-bookworm", "FROM python"),
        (SBATCH, '"$SLURM_SUBMIT_DIR"', "$SLURM_SUBMIT_DIR"),
        (COMPOSE, "depends_on", "depend_on"),
        (KUBERNETES, "completionMode", "completionModus"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_the_linter_notices_a_mistake(tmp_path, path, before, after):
    text = path.read_text()
    assert before in text
    bad = tmp_path / path.name
    bad.write_text(text.replace(before, after))
    assert lint(bad, LINTERS[path]).returncode != 0


def makefile_installs() -> list[list[str]]:
    """The commands by which the Makefile makes its environment, as make fills them in."""
    command = ["make", "--dry-run", "--always-make", ".venv/.ready"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=20)
    found = [shlex.split(line) for line in done.stdout.splitlines()]
    # A folder that an interrupted set-up left is cleared; an image has none.
    return [[word for word in words if word != "--clear"] for words in found if "venv" in words or "pip" in words]


def dockerfile_installs() -> list[list[list[str]]]:
    """For every RUN that makes an environment, its commands."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    runs = [run for run in re.findall(r"^RUN (.*)$", text, re.MULTILINE) if "pip install" in run]
    return [[shlex.split(command) for command in run.split("&&")] for run in runs]


def test_both_images_install_what_the_makefile_installs():
    expected = makefile_installs()
    assert len(expected) == 3  # the environment, setuptools, the project
    assert dockerfile_installs() == [expected]


def test_the_dockerfile_has_both_targets_and_leaves_root():
    text = DOCKERFILE.read_text()
    assert re.findall(r"^FROM run AS (\w+)$", text, re.MULTILINE) == ["cpu", "gpu"]
    users = re.findall(r"^USER (\w+)$", text, re.MULTILINE)
    assert users == ["1000"]
    copied = {word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


def torchrun_of_compose() -> list[str]:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert len({service["command"] for service in services.values()}) == 1
    assert len(services) == 2
    return shlex.split(services["host0"]["command"])


def torchrun_of_kubernetes() -> list[str]:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return spec["template"]["spec"]["containers"][0]["command"]


def torchrun_of_slurm() -> list[str]:
    text = SBATCH.read_text()
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    assert nodes is not None
    words = shlex.split(next(line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.startswith("srun")))
    return [nodes[1] if word == "$SLURM_NNODES" else word for word in words if word not in ("$@", "&")]


@pytest.mark.parametrize("read", [torchrun_of_compose, torchrun_of_kubernetes, torchrun_of_slurm])
def test_the_ranks_that_are_started_are_those_that_the_configuration_needs(read, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [part for word in read() for part in (word.split("=", 1) if word.startswith("--") else [word])]
    assert any(Path(word).name == "torchrun" for word in words)
    value = {name: following for name, following in pairwise(words) if name.startswith("--")}
    arguments = words[words.index("launch/train.py") + 1 :]
    config, _ = ConfigParser(arguments, prog="test", description="").parse()
    launch = Launch(0, int(value["--nnodes"]) * int(value["--nproc-per-node"]), 0)
    check_world(launch, num_stages=config.parallel.stages, num_replicas=config.data_parallel.degree)
