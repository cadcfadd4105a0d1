"""Whether a rank stays as large as it is: what it holds is counted while it trains, and growth is found afterwards.

A rank counts itself in the middle between two disturbances (evaluation, horizon change, checkpoint), always with the
same windows, so that what these hold for a while is not taken for growth.
"""

import ctypes
import functools
import gc
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpc_dist.planner.adapt import Decision, GrowingHorizon
from mpc_dist.training import job
from mpc_dist.training.loop import Loop

DISTURBED_EVERY = 20
"""Steps between evaluations, and between changes of the horizon."""
EVERY = 2 * DISTURBED_EVERY
"""Steps between samples, and between checkpoints: by then the horizon of two stages has gone up and down."""
STEP, MEMORY, TENSORS, OBJECTS, THREADS, DESCRIPTORS = "step", "KiB", "tensors", "objects", "threads", "descriptors"
MOST_KIB = 100.0
"""Per 100 steps, of memory: half of what the smallest thing would take that a step of the soak's pipeline could keep, a
micro-batch's state of 2 KiB. Until they have settled, after 2,000 steps, processes were seen to grow by up to 69 (in
few jumps, to a bound), and by 14 in the 3,000 steps after."""
MOST_OBJECTS = 20.0
"""Per 100 steps, of objects that Python's collector knows: one per checkpoint and change would be 7, one per
step 100. Some of torch's caches still fill slowly, by a few."""

Sample = Mapping[str, float]


class SwingingHorizon(GrowingHorizon):
    """Changes the windows at every decision, for ever: up to all stages, then from one again."""

    def decide(self, cosine: float, loss: float) -> Decision:
        self._sizes = [*self._sizes[1:], self._sizes[0]]
        return Decision(self.size, "swings", cosine, loss)


def measure(step: int) -> dict[str, float]:
    """What this process holds now, once what nobody refers to is gone and the heaps have given back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = _read_status()["RssAnon"]  # before there is a list of all objects
    found = gc.get_objects()
    return {
        STEP: step,
        # Anonymous pages only: parts of libraries that are read for the first time are not memory that is held.
        MEMORY: float(memory.split()[0]),
        TENSORS: sum(issubclass(type(one), torch.Tensor) for one in found),
        # The bar of the progress remembers its last 1,000 steps.
        OBJECTS: sum(type(one).__module__ != "rich.progress" for one in found),
        THREADS: int(_read_status()["Threads"]),
        DESCRIPTORS: len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


def _read_status() -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())


def count_while_training(folder: Path, rank: int) -> None:
    """Let this process sample itself while it trains, and its horizon swing if it is adaptive."""
    loop: Any = Loop
    train_step = loop._train_step
    path = samples_path(folder, rank)

    @functools.wraps(train_step)
    def train_and_measure(self: Any, step: int, **options: Any) -> None:
        train_step(self, step, **options)
        if step % EVERY == DISTURBED_EVERY // 2:
            with path.open("a") as file:
                file.write(json.dumps(measure(step)) + "\n")

    loop._train_step = train_and_measure
    job.GrowingHorizon = SwingingHorizon  # type: ignore[misc]


def samples_path(folder: Path, rank: int) -> Path:
    return folder / f"samples-{rank}.jsonl"


def read_samples(folder: Path, rank: int) -> list[Sample]:
    return [json.loads(line) for line in samples_path(folder, rank).read_text().splitlines()]


def slope(samples: Sequence[Sample], what: str) -> float:
    """Growth per 100 steps: the median over all pairs that are a quarter of the samples apart.

    A single jump is in fewer than half of them: Python takes memory by the MiB.
    """
    apart = max(1, len(samples) // 8 * 2)  # even: what comes and goes with every other sample is no growth
    pairs = zip(samples, samples[apart:], strict=False)
    return 100 * statistics.median(
        (after[what] - before[what]) / (after[STEP] - before[STEP]) for before, after in pairs
    )


def find_growth(samples: Sequence[Sample], *, warm_up: int, most_kib: float = MOST_KIB) -> list[str]:
    """What grew after the first `warm_up` steps, in words; nothing if the rank was steady."""
    kept = [sample for sample in samples if sample[STEP] > warm_up]
    assert len(kept) >= 4, f"{len(kept)} samples after step {warm_up} tell nothing"
    found = []
    for what, most in ((MEMORY, most_kib), (OBJECTS, MOST_OBJECTS)):
        growth = slope(kept, what)
        if growth > most:
            found.append(f"{what}: +{growth:.1f} per 100 steps (at most {most:g}): {_show(kept, what)}")
    third = len(kept) // 3
    for what in (TENSORS, THREADS, DESCRIPTORS):
        # These are few and come and go: at the end always more of them than ever at the beginning is growth.
        least, most = min(one[what] for one in kept[-third:]), max(one[what] for one in kept[:third])
        if least > most:
            found.append(f"{what}: {_show(kept, what)}")
    return found


def _show(samples: Sequence[Sample], what: str) -> str:
    return " ".join(f"{sample[what]:g}" for sample in samples)
