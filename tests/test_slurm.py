"""The Slurm script, run by bash with stand-ins for srun, scontrol and torchrun: what it passes on, when it requeues."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

STAND_INS = {
    # As Slurm's: signals that it gets go on to what it runs.
    "bin/srun": 'shift\n"$@" &\nchild=$!\ntrap "kill -TERM $child" TERM\nwait $child || wait $child\n',
    "bin/scontrol": 'if [ "$1" = show ]; then echo host0; else echo "$@" >> calls; fi\n',
}
TORCHRUN = {
    "saves and stops": "trap 'touch saved; exit 1' TERM\ntouch started\nwhile true; do sleep 0.1; done\n",
    "ends just then": "trap 'exit 0' TERM\ntouch started\nwhile true; do sleep 0.1; done\n",
    "fails": "exit 3\n",
    "succeeds": "exit 0\n",
}


def start(folder: Path, torchrun: str) -> subprocess.Popen[str]:
    for name, body in {**STAND_INS, ".venv/bin/torchrun": TORCHRUN[torchrun]}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}")
        path.chmod(0o755)
    given = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2"}
    environment = {**os.environ, **given, "SLURM_JOB_ID": "7", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch")]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def calls(folder: Path) -> str:
    path = folder / "calls"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_job_that_is_asked_to_stop_saves_and_is_requeued_once(number, tmp_path: Path):
    job = start(tmp_path, "saves and stops")
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(number)
    said, _ = job.communicate(timeout=30)
    assert (job.returncode, calls(tmp_path)) == (0, "requeue 7\n"), said
    assert (tmp_path / "saved").exists()


def test_a_job_that_ends_just_then_is_not_requeued(tmp_path: Path):
    job = start(tmp_path, "ends just then")
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=30)
    assert (job.returncode, calls(tmp_path)) == (0, ""), said


@pytest.mark.parametrize(("how", "code"), [("fails", 3), ("succeeds", 0)])
def test_a_job_that_ends_by_itself_is_not_requeued(how, code, tmp_path: Path):
    job = start(tmp_path, how)
    said, _ = job.communicate(timeout=30)
    assert (job.returncode, calls(tmp_path)) == (code, ""), said
