"""`torchrun --max-restarts` brings a struck job back without a human; a preempted one it leaves alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.reliability.points import (
    COMMON,
    GROWING,
    JOBS,
    Reference,
    choose_strike,
    is_blamed,
    make_reference,
    read_losses,
)
from tests.reliability.strike import ACTIONS, EVALUATION, HORIZON, SAVE, START
from tests.reliability.test_preemption import ENDLESS

STOP_TIMEOUT = 15.0


@contextmanager
def torchrun(script: str, folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", script, *COMMON, *JOBS[GROWING].split()]
    given = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--training.folder", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, **given, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # its ranks go with it
        process.communicate()


def ranks_of(launcher: int) -> list[int]:
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in found]


def wait_for_checkpoints(folder: Path, number: int = 1, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while len(list_checkpoints(folder_of(folder))) < number and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(list_checkpoints(folder_of(folder))) >= number


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(GROWING, tmp_path_factory.mktemp("reference"))


CASES = [(phase, signal.SIGKILL) for phase in (START, ACTIONS, SAVE, EVALUATION, HORIZON)]
CASES += [(ACTIONS, signal.SIGSEGV), (SAVE, signal.SIGSEGV), (ACTIONS, signal.SIGSTOP), (HORIZON, signal.SIGSTOP)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "how"), CASES, ids=lambda value: value.name if isinstance(value, signal.Signals) else value
)
def test_torchrun_brings_a_struck_job_back(phase, how, reference, tmp_path: Path):
    strike = choose_strike(random.Random(f"torchrun {phase} {how}"), reference, phase, how)
    values = json.dumps([strike.phase, strike.rank, strike.place, int(strike.signal)])
    timeout = ["--parallel.timeout", str(STOP_TIMEOUT)] if how == signal.SIGSTOP else []
    note = tmp_path / "struck"
    entry = str(ROOT / "tests" / "reliability" / "entry.py")
    with torchrun(entry, tmp_path / "run", *timeout, STRIKE=values, STRIKE_NOTE=str(note)) as job:
        said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said
    assert note.exists(), "no strike fell"
    losses = read_losses(tmp_path / "run", 2)
    assert dict(losses) == dict(reference.losses)
    assert all(reference.losses[key] == loss for key, loss in losses)
    if how == signal.SIGSTOP:
        assert is_blamed(strike.rank, said)


def starts(folder: Path) -> list[int]:
    return [sum(line["event"] == "start" for line in read_metrics(folder, rank)) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["a rank", "the launcher"])
def test_a_preempted_job_is_saved_and_not_started_again(whom, tmp_path: Path):
    with torchrun("launch/train.py", tmp_path, *ENDLESS, "--checkpoints.every", "5") as job:
        wait_for_checkpoints(tmp_path)
        ranks = ranks_of(job.pid)
        assert len(ranks) == 2
        os.kill(job.pid if whom == "the launcher" else ranks[1], signal.SIGTERM)
        said, _ = job.communicate(timeout=100)
    assert job.returncode != 0  # it has not succeeded
    lines = [line for rank in range(2) for line in read_metrics(tmp_path, rank)]
    (last,) = {line["step"] for line in lines if line["event"] == "preempted"}
    assert step_of(list_checkpoints(folder_of(tmp_path))[-1]) == last
    assert f"stopped by a signal after step {last}, which is saved" in said
    assert starts(tmp_path) == [1, 1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path):
    with torchrun("launch/train.py", tmp_path, *ENDLESS, "--checkpoints.every", "5") as job:
        wait_for_checkpoints(tmp_path)
        ranks = ranks_of(job.pid)
        job.kill()
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
