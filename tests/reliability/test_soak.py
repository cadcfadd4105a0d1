"""The soak itself: a tiny one passes, and it finds what it is there to find."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mpc_dist.training.loop import Loop
from tests.conftest import ROOT
from tests.reliability import left_over
from tests.reliability.agent import run_job
from tests.reliability.left_over import MARK, SHARED_MEMORY, Surroundings
from tests.reliability.soak import COMMON
from tests.reliability.steady import (
    DESCRIPTORS,
    EVERY,
    MEMORY,
    OBJECTS,
    STEP,
    TENSORS,
    THREADS,
    count_while_training,
    find_growth,
    read_samples,
    slope,
)
from tests.training.local import parse

STEADY = {MEMORY: 2e5, TENSORS: 100, OBJECTS: 3e5, THREADS: 20, DESCRIPTORS: 40}


def make(**changed: Callable[[int], float]) -> list[dict[str, float]]:
    """Samples of a rank that is steady but for these."""
    steps = range(EVERY // 4, 2000, EVERY)
    return [{STEP: step, **STEADY, **{what: change(step) for what, change in changed.items()}} for step in steps]


@pytest.mark.slow
def test_a_tiny_soak_passes_and_leaves_nothing():
    command = f"{sys.executable} -m tests.reliability.soak --jobs 1 --long 1 --steps 300 --seed 0".split()
    # Sockets are in the temporary folder, and their paths must be short.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        left = list(Path(folder).iterdir())
    assert done.returncode == 0, done.stdout
    assert "1 x 300 steps" in done.stdout
    assert "1 x job" in done.stdout
    assert "nothing was wrong" in done.stdout
    assert not left


def plant(folder: Path, rank: int) -> None:
    """Let a rank keep something of everything."""
    count_while_training(folder, rank)
    loop: Any = Loop
    train_step = loop._train_step
    kept: list[object] = []

    def keep_and_train(self: Any, step: int, **options: Any) -> None:
        kept.append([torch.ones(512)])
        if step % 10 == 0:
            kept.append(os.open("/dev/null", os.O_RDONLY))
        if step % 25 == 0:
            kept.append(thread := threading.Thread(target=threading.Event().wait, daemon=True))
            thread.start()
        train_step(self, step, **options)

    loop._train_step = keep_and_train


def test_a_planted_leak_of_every_kind_is_found(tmp_path: Path):
    arguments = f"--model.num_blocks 2 --batch_size 2 --training.steps 300 --training.folder {tmp_path / 'run'}"
    outcome = run_job(
        parse([*COMMON, *arguments.split()]), tmp_path / "job", max_restarts=0, prepare=partial(plant, tmp_path)
    )
    assert outcome.succeeded, outcome.attempts[-1].errors
    found = find_growth(read_samples(tmp_path, 0), warm_up=75)
    assert [text.partition(":")[0] for text in found] == [MEMORY, OBJECTS, TENSORS, THREADS, DESCRIPTORS]
    # 2 KiB at every step, and what an allocator adds to it.
    assert 200 <= slope(read_samples(tmp_path, 0), MEMORY) <= 1000


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({MEMORY: lambda step: 2e5 + 0.2 * step, OBJECTS: lambda step: 3e5 + 0.1 * step}, []),
        ({MEMORY: lambda step: 2e5 + 5000 * (step > 1200)}, []),  # a jump is no growth
        ({THREADS: lambda step: 20 + step // EVERY % 2, TENSORS: lambda step: 100 - step // EVERY % 3}, []),
        ({MEMORY: lambda step: 2e5 + 1.5 * step + 300 * (step // EVERY % 2)}, [MEMORY]),
        ({OBJECTS: lambda step: 3e5 + 0.3 * step}, [OBJECTS]),
        ({THREADS: lambda step: 20 + step // 500 + step // EVERY % 2}, [THREADS]),
        ({DESCRIPTORS: lambda step: 40 + step // 600}, [DESCRIPTORS]),
    ],
)
def test_growth_is_told_from_what_comes_and_goes(changed, found):
    assert [text.partition(":")[0] for text in find_growth(make(**changed), warm_up=500)] == found


def test_what_a_job_leaves_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(left_over, "PATIENCE", 0.2)
    surroundings = Surroundings(tmp_path, "test")
    shared = SHARED_MEMORY / f"mpc_dist-test-{os.getpid()}"
    with surroundings.expect_nothing_left():
        subprocess.run(["true"], env={MARK: "test"}, check=True)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "other"}) as other:
        started: list[subprocess.Popen[bytes]] = []

        def leave() -> None:
            with surroundings.expect_nothing_left():
                started.append(subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "test"}))
                shared.touch()
                (tmp_path / "file").touch()

        try:
            with pytest.raises(AssertionError) as told:
                leave()
        finally:
            shared.unlink(missing_ok=True)
            for process in (other, *started):
                process.kill()
                process.wait()
    assert str(other.pid) not in str(told.value)
    for what in (f"process {started[0].pid} (sleep 60", f"shared memory {shared.name}", "temporary file file"):
        assert what in str(told.value)
