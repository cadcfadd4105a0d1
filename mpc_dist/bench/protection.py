"""`bench.py protection`: what watching over waits and numbers costs a step, with compute emulated on gloo ranks.

Without: nothing is looked at and no thread runs. With `stop`: every tensor of a step is looked at and a watcher runs on
every rank. With `skip`: the ranks also agree before each update. The same processes alternate between them, in turns,
so that whatever else the machine does hits all alike.
"""

import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mpc_dist.bench.emulate import Pace, SleepingBlock, cheap_loss, measure_overshoot
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity
from mpc_dist.runtime.guard import Policy
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import Costs, lay_out
from mpc_dist.training.watcher import Watcher
from mpc_dist.validation import check_whole
from mpc_dist.windows import sliding

WIDTH, ROWS = 256, 64
"""Of a micro-batch's state: what is looked at has a size."""
TIMEOUT = timedelta(seconds=120)
SYSTEMS: dict[Policy, str] = {"ignore": "unprotected", "stop": "protected", "skip": "protected, skipping together"}


@dataclass(frozen=True)
class ProtectionSetting:
    """What every rank measures."""

    num_ranks: int
    num_microbatches: int
    seconds: float
    """f: one stage's forward of one micro-batch."""
    num_steps: int
    """Timed steps of each part of a round."""
    repeats: int
    """Rounds, each with a part of every system."""

    def __post_init__(self) -> None:
        check_whole("--ranks", self.num_ranks, minimum=2)
        check_whole("--microbatches", self.num_microbatches, minimum=1)
        check_whole("--steps", self.num_steps, minimum=1)
        check_whole("--repeats", self.repeats, minimum=1)


def bench_protection(setting: ProtectionSetting) -> list[Row]:
    """A row without protection, and rows with it and their ratios to the first."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, measure_overshoot(), Path(folder))
        ranks = run_local_ranks(_measure, setting.num_ranks, *arguments, timeout=1800.0, group_timeout=120.0)
    # A part lasts as long as it does on its slowest rank.
    times = {key: [max(found) for found in zip(*(rank[key] for rank in ranks), strict=True)] for key in SYSTEMS}
    rows = []
    for policy, name in SYSTEMS.items():
        ratios = [own / plain for own, plain in zip(times[policy], times["ignore"], strict=True)]
        rows.append(
            Row.of_times(
                times[policy],
                system=name,
                windows="sliding:1",
                split=False,
                stages=setting.num_ranks,
                microbatches=setting.num_microbatches,
                extra={
                    "ratio of medians": round(statistics.median(times[policy]) / statistics.median(times["ignore"]), 4),
                    "median of the rounds' ratios": round(statistics.median(ratios), 4),
                },
            )
        )
    return rows


def _measure(rank: int, setting: ProtectionSetting, overshoot: float, folder: Path) -> dict[Policy, list[float]]:
    """This rank's mean step time in every round, for each system."""
    mesh = build_mesh(Launch(rank, setting.num_ranks, rank), num_stages=setting.num_ranks, timeout=TIMEOUT)
    pipelines = {policy: _build(mesh, setting, overshoot, policy) for policy in SYSTEMS}
    times: dict[Policy, list[float]] = {policy: [] for policy in SYSTEMS}
    for repeat in range(setting.repeats):
        # Which comes first alternates too.
        for policy in tuple(SYSTEMS) if repeat % 2 == 0 else tuple(reversed(SYSTEMS)):
            times[policy].append(_time_steps(rank, mesh, pipelines[policy], setting, folder, is_on=policy != "ignore"))
    return times


def _build(mesh: Mesh, setting: ProtectionSetting, overshoot: float, policy: Policy) -> Pipeline:
    return Pipeline(
        mesh,
        lay_out(sliding(setting.num_ranks, 1), [1] * setting.num_ranks),
        build_block=lambda _: SleepingBlock(Pace(setting.seconds, overshoot), WIDTH),
        build_readout=lambda _: Identity(),
        loss=cheap_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        num_microbatches=setting.num_microbatches,
        costs=Costs.uniform([setting.seconds] * setting.num_ranks),
        options=StageOptions(record_times=True, on_nonfinite=policy),
        timeout=TIMEOUT,
    )


def _time_steps(
    rank: int, mesh: Mesh, pipeline: Pipeline, setting: ProtectionSetting, folder: Path, *, is_on: bool
) -> float:
    """The mean step time of one part."""
    shape = setting.num_microbatches * ROWS, WIDTH
    batch = torch.zeros(shape), torch.zeros(shape)
    watcher = Watcher(mesh, rank, setting.num_ranks, folder, timeout=TIMEOUT.total_seconds()) if is_on else None
    with nullcontext() if watcher is None else watcher:
        dist.barrier()
        pipeline.step(*batch)
        begin = time.perf_counter()
        for _ in range(setting.num_steps):
            pipeline.step(*batch)
        seconds = (time.perf_counter() - begin) / setting.num_steps
    pipeline.close()
    dist.barrier()
    if watcher is not None:
        watcher.close()
    return seconds
