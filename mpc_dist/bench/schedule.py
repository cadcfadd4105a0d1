"""`bench.py schedule`: step time of horizon pipelines and of torch's schedules, on gloo ranks with emulated compute."""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpc_dist.bench.emulate import Pace, SleepingBlock, cheap_loss, measure_overshoot
from mpc_dist.bench.peers import PEERS, Step, build_peer
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.schedule import Costs, Layout, build_schedule, lay_out, simulate
from mpc_dist.windows import Windows, backprop, sliding, tumbling

WIDTH = 16
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Setting:
    """What every rank measures."""

    num_stages: int
    microbatches: tuple[int, ...]
    windows: tuple[tuple[str, bool], ...]
    """(name, split) of our systems."""
    peers: tuple[str, ...]
    seconds: float
    """f: one stage's forward of one micro-batch."""
    costs: tuple[float, ...]
    """Each stage's cost relative to f."""
    repeats: int
    repeat_seconds: float
    """About how long each system runs in each repeat."""
    latency: float
    """What the order of actions is built for, in seconds per message."""


OURS = (
    ("sliding:1", False),
    ("sliding:2", True),
    ("sliding:3", True),
    ("tumbling:2", True),
    ("tumbling:4", True),
    ("backprop", False),
    ("backprop", True),
)


def bench_schedule(setting: Setting) -> list[Row]:
    """Rows of every system, ours with the simulator's prediction."""
    by_rank: list[dict[Any, Any]] = [{} for _ in range(setting.num_stages)]
    overshoot = measure_overshoot()
    # New processes for each number of micro-batches: what one leaves behind must not slow the next.
    for num_microbatches in setting.microbatches:
        one = replace(setting, microbatches=(num_microbatches,))
        found = run_local_ranks(_measure, setting.num_stages, one, overshoot, timeout=120.0 + 60 * setting.repeats)
        for mine, new in zip(by_rank, found, strict=True):
            mine |= new
    rows = []
    for key, first in by_rank[0].items():
        system, windows, split, num_microbatches = key
        if first is None:
            continue
        ranks = [found[key] for found in by_rank]
        times = [max(repeat) for repeat in zip(*(rank["times"] for rank in ranks), strict=True)]  # of the slowest rank
        extra: dict[str, Any] = {"units": statistics.median(times) / setting.seconds}
        if system == "mpc_dist":
            predicted = _predict(setting, windows, split, num_microbatches)
            extra |= {
                "simulated": predicted / setting.seconds,
                "measured/simulated": statistics.median(times) / predicted,
                "in_flight": max(rank["in_flight"] for rank in ranks),
            }
        rows.append(
            Row.of_times(
                times,
                system=system,
                windows=windows,
                split=split,
                stages=setting.num_stages,
                microbatches=num_microbatches,
                extra=extra,
            )
        )
    return rows


def parse_windows(name: str, num_blocks: int) -> Windows:
    """`sliding:2`, `tumbling:4` or `backprop`."""
    kind, _, size = name.partition(":")
    if kind == "backprop":
        return backprop(num_blocks)
    return sliding(num_blocks, int(size)) if kind == "sliding" else tumbling(num_blocks, int(size))


def _layout(setting: Setting, windows: str) -> Layout:
    return lay_out(parse_windows(windows, setting.num_stages), [1] * setting.num_stages)


def _costs(setting: Setting) -> Costs:
    return Costs.uniform([setting.seconds * cost for cost in setting.costs], latency=setting.latency)


def _predict(setting: Setting, windows: str, split: bool, num_microbatches: int) -> float:
    layout, costs = _layout(setting, windows), _costs(setting)
    schedule = build_schedule(layout, num_microbatches, split=split, costs=costs)
    return simulate(schedule, layout, costs).step_time


def _measure(rank: int, setting: Setting, overshoot: float) -> dict[tuple[str, str, bool, int], dict[str, Any] | None]:
    """This rank's step times, systems alternating within each repeat."""
    results: dict[tuple[str, str, bool, int], dict[str, Any] | None] = {}
    # One mesh for all: a system's messages have all arrived before the next one starts.
    mesh = build_mesh(Launch(rank, setting.num_stages, rank), num_stages=setting.num_stages, timeout=TIMEOUT)
    for num_microbatches in setting.microbatches:
        systems: dict[tuple[str, str, bool, int], Any] = {}
        num_steps: dict[tuple[str, str, bool, int], int] = {}
        for windows, split in setting.windows:
            systems["mpc_dist", windows, split, num_microbatches] = _Ours(
                mesh, setting, windows, split, num_microbatches, overshoot
            )
        for name in setting.peers:
            key = name, "backprop", "ZB" in name or "ZeroBubble" in name, num_microbatches
            systems[key] = _build_peer(name, rank, setting, num_microbatches, overshoot)
            results[key] = None
        for key, system in systems.items():
            if system is not None:
                results[key] = {"times": [], "in_flight": 0}
                for _ in range(2):  # connects, then warms up
                    start = time.perf_counter()
                    system()
                    if isinstance(system, _Ours):
                        system.finish()
                found_steps = setting.repeat_seconds / (time.perf_counter() - start)
                # All ranks must make the same number of steps.
                agreed = torch.tensor(min(100, max(5, round(found_steps))))
                dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
                num_steps[key] = int(agreed)
        gc.collect()
        gc.freeze()  # what has been built is not to be searched for garbage again and again
        for _ in range(setting.repeats):
            for key, system in systems.items():
                found = results[key]
                if found is None:
                    continue
                dist.barrier()
                found["times"].append(_time_steps(system, num_steps[key]))
                if isinstance(system, _Ours):
                    system.finish()
                    found["in_flight"] = max(found["in_flight"], system.most_in_flight)
    return results


def _time_steps(step: Step, num_steps: int) -> float:
    """The median time from one update to the next, after a first step that fills the pipe."""
    ends = []
    for _ in range(num_steps + 1):
        step()
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


class _Ours:
    """A horizon pipeline as a function that makes one step."""

    def __init__(
        self, mesh: Mesh, setting: Setting, windows: str, split: bool, num_microbatches: int, overshoot: float
    ) -> None:
        self._pipeline = Pipeline(
            mesh,
            _layout(setting, windows),
            build_block=lambda t: SleepingBlock(Pace(setting.seconds * setting.costs[t], overshoot), WIDTH),
            build_readout=lambda _: Identity(),
            loss=cheap_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            num_microbatches=num_microbatches,
            split=split,
            costs=_costs(setting),
            timeout=TIMEOUT,
        )
        self._batch = _batch(num_microbatches)
        self.most_in_flight = 0

    def finish(self) -> None:
        """Let the neighbours take what was sent."""
        self._pipeline.close()

    def __call__(self) -> None:
        record = self._pipeline.step(*self._batch).record
        self.most_in_flight = max(self.most_in_flight, record.most_in_flight)


def _batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_microbatches, WIDTH), torch.zeros(num_microbatches, WIDTH)


def _build_peer(name: str, rank: int, setting: Setting, num_microbatches: int, overshoot: float) -> Step | None:
    def build_chunk(index: int, total: int) -> nn.Module:
        per_rank = total // setting.num_stages
        # Stage `index` of `total` holds 1/per_rank of the blocks of one of our stages, in the order of the chain.
        seconds = setting.seconds * setting.costs[index // per_rank] / per_rank
        return SleepingBlock(Pace(seconds, overshoot), WIDTH)

    try:
        return build_peer(
            name, rank, setting.num_stages, num_microbatches, build_chunk, *_batch(num_microbatches), cheap_loss
        )
    except (ValueError, RuntimeError, AssertionError):
        return None  # torch refuses this number of micro-batches


def speed_ups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our systems against torch's fastest at the same number of micro-batches."""
    found = []
    for row in rows:
        peers = [other for other in rows if other.system in PEERS and other.microbatches == row.microbatches]
        if row.system == "mpc_dist" and peers:
            best = min(peers, key=lambda other: other.step_seconds)
            found.append(
                {
                    "windows": row.windows,
                    "split": row.split,
                    "microbatches": row.microbatches,
                    "against": best.system,
                    "speed_up": best.step_seconds / row.step_seconds,
                }
            )
    return found
