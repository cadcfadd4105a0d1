"""`bench.py checkpoint`: what saving in the background costs the step time, on gloo ranks with emulated compute."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mpc_dist.bench.emulate import Pace, SleepingBlock, cheap_loss, measure_overshoot
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.schedule import lay_out
from mpc_dist.training.checkpoint import CheckpointSaver
from mpc_dist.windows import sliding

WIDTH = 16
WARM_UP_STEPS = 3
TIMEOUT = timedelta(seconds=60)
KEEP = 2


@dataclass(frozen=True)
class SavingSetting:
    """What every rank does."""

    num_stages: int
    num_microbatches: int
    seconds: float
    """f: one stage's forward of one micro-batch."""
    bytes_per_rank: int
    """What each rank saves."""
    every: int
    """Steps between saves."""
    num_steps: int
    repeats: int


class _HeavyBlock(SleepingBlock):
    """A sleeping block with something to save."""

    def __init__(self, pace: Pace, num_bytes: int) -> None:
        super().__init__(pace, WIDTH)
        self.register_buffer("ballast", torch.rand(num_bytes // 4))


def bench_checkpoint(setting: SavingSetting, on_progress: Callable[[], None] = lambda: None) -> list[Row]:
    """Two rows: steps without saving and with it, alternating, each time in new processes."""
    overshoot = measure_overshoot()
    systems = ("without saving", "saving")
    times: dict[str, list[float]] = {name: [] for name in systems}
    stalls: list[float] = []
    for _ in range(setting.repeats):
        for name in systems:
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_local_ranks(
                    _measure,
                    setting.num_stages,
                    setting,
                    overshoot,
                    folder if name == "saving" else None,
                    timeout=300.0,
                )
            times[name].append(max(seconds for seconds, _ in ranks))
            stalls += [stall for _, found in ranks for stall in found]
            on_progress()
    ratio = statistics.median(times["saving"]) / statistics.median(times["without saving"])
    extras = {
        "without saving": {},
        "saving": {"ratio": ratio, "median stall ms": 1000 * statistics.median(stalls), "worst ms": 1000 * max(stalls)},
    }
    return [
        Row.of_times(
            times[name],
            system=name,
            windows="sliding:1",
            split=False,
            stages=setting.num_stages,
            microbatches=setting.num_microbatches,
            extra=extras[name],
        )
        for name in systems
    ]


def _measure(rank: int, setting: SavingSetting, overshoot: float, folder: str | None) -> tuple[float, list[float]]:
    """This rank's mean step time, and how long each call to save took."""
    mesh = build_mesh(Launch(rank, setting.num_stages, rank), num_stages=setting.num_stages, timeout=TIMEOUT)
    pipeline = Pipeline(
        mesh,
        lay_out(sliding(setting.num_stages, 1), [1] * setting.num_stages),
        build_block=lambda _: _HeavyBlock(Pace(setting.seconds, overshoot), setting.bytes_per_rank),
        build_readout=lambda _: Identity(),
        loss=cheap_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        num_microbatches=setting.num_microbatches,
        timeout=TIMEOUT,
    )
    saver = None
    if folder is not None:
        saver = CheckpointSaver(Path(folder), keep=KEEP, fingerprint={}, rank=rank, group=mesh.background)
    batch = torch.zeros(setting.num_microbatches, WIDTH), torch.zeros(setting.num_microbatches, WIDTH)
    for _ in range(WARM_UP_STEPS):
        pipeline.step(*batch)
    dist.barrier()
    stalls: list[float] = []
    start = time.perf_counter()
    for step in range(1, setting.num_steps + 1):
        pipeline.step(*batch)
        if saver is not None and step % setting.every == 0:
            before = time.perf_counter()
            saver.save(step, pipeline.collect_state(), {})
            stalls.append(time.perf_counter() - before)
    seconds = (time.perf_counter() - start) / setting.num_steps  # the mean: a median would not see a stall
    if saver is not None:
        saver.wait()
        failures = [outcome.failure for outcome in saver.take_outcomes() if outcome.failure is not None]
        assert not failures, failures
    pipeline.close()
    return seconds, stalls
