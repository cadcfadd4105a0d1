"""`bench.py schedule`: step time of horizon pipelines and of torch's schedules, on gloo ranks with emulated compute."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import Costs, Layout, build_schedule, lay_out, simulate
from mpc_dist.windows import Windows, backprop, sliding, tumbling

WIDTH = 16
WARM_UP_STEPS = 3
TIMEOUT = timedelta(seconds=60)
RANKS_TIMEOUT = 300.0


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
    plain_sleep: bool = False
    """Whether blocks sleep as long as asked, or less by what this machine oversleeps."""


OURS = "mpc_dist"
WINDOWS = (
    ("sliding:1", False),
    ("sliding:2", True),
    ("sliding:3", True),
    ("tumbling:2", True),
    ("tumbling:4", True),
    ("backprop", False),
    ("backprop", True),
)


@dataclass(frozen=True)
class System:
    """One thing to measure."""

    name: str
    """`mpc_dist` or a peer's name."""
    windows: str
    split: bool
    num_microbatches: int
    clips_globally: bool = False
    """Whether gradients are clipped by the norm over all stages, which makes every rank wait for all others."""


def bench_schedule(setting: Setting, on_progress: Callable[[], None] = lambda: None) -> list[Row]:
    """Rows of every system, ours with the simulator's prediction."""
    overshoot = 0.0 if setting.plain_sleep else measure_overshoot()
    times: dict[System, list[float]] = {}
    in_flight: dict[System, int] = {}
    # Systems alternate, each time in new processes: what one leaves behind must not slow the next.
    for _ in range(setting.repeats):
        for system in list_systems(setting):
            ranks = run_local_ranks(_measure, setting.num_stages, setting, system, overshoot, timeout=RANKS_TIMEOUT)
            on_progress()
            if ranks[0] is not None:
                times.setdefault(system, []).append(max(seconds for seconds, _ in ranks))  # of the slowest rank
                in_flight[system] = max(in_flight.get(system, 0), *(held for _, held in ranks))
    rows = []
    for system, found in times.items():
        median = statistics.median(found)
        extra: dict[str, Any] = {"units": median / setting.seconds}
        if system.name == OURS:
            extra["in_flight"] = in_flight[system]
            if system.clips_globally:
                extra["clip"] = "global"
            else:
                predicted = _predict(setting, system)
                extra |= {"simulated": predicted / setting.seconds, "measured/simulated": median / predicted}
        rows.append(
            Row.of_times(
                found,
                system=system.name,
                windows=system.windows,
                split=system.split,
                stages=setting.num_stages,
                microbatches=system.num_microbatches,
                extra=extra,
            )
        )
    return rows


def list_systems(setting: Setting) -> list[System]:
    """Every system at every number of micro-batches."""
    return [
        system
        for number in setting.microbatches
        for system in (
            *(System(OURS, windows, split, number) for windows, split in setting.windows),
            System(OURS, "sliding:1", False, number, clips_globally=True),
            *(System(peer, "backprop", "ZB" in peer or "ZeroBubble" in peer, number) for peer in setting.peers),
        )
    ]


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


def _predict(setting: Setting, system: System) -> float:
    layout, costs = _layout(setting, system.windows), _costs(setting)
    schedule = build_schedule(layout, system.num_microbatches, split=system.split, costs=costs)
    return simulate(schedule, layout, costs).step_time


def _measure(rank: int, setting: Setting, system: System, overshoot: float) -> tuple[float, int] | None:
    """This rank's median step time and most micro-batches in flight; None if the system refuses the setting."""
    if system.name == OURS:
        step: _Ours | Step | None = _Ours(rank, setting, system, overshoot)
    else:
        step = _build_peer(rank, setting, system, overshoot)
    if step is None:
        return None
    for _ in range(WARM_UP_STEPS):  # the first connects
        step()
    gc.freeze()  # what has been built is not to be searched for garbage again and again
    dist.barrier()
    # All ranks must make the same number of steps.
    num_steps = min(100, max(10, round(setting.repeat_seconds / _predict(setting, system))))
    seconds = time_steps(step, num_steps)
    if not isinstance(step, _Ours):
        return seconds, 0
    step.finish()
    return seconds, step.most_in_flight


def time_steps(step: Step, num_steps: int) -> float:
    """The median time from one update to the next, after a first step that fills the pipe."""
    ends = []
    for _ in range(num_steps + 1):
        step()
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


class _Ours:
    """A horizon pipeline as a function that makes one step."""

    def __init__(self, rank: int, setting: Setting, system: System, overshoot: float) -> None:
        launch = Launch(rank, setting.num_stages, rank)
        self._pipeline = Pipeline(
            build_mesh(launch, num_stages=setting.num_stages, timeout=TIMEOUT),
            _layout(setting, system.windows),
            build_block=lambda t: SleepingBlock(Pace(setting.seconds * setting.costs[t], overshoot), WIDTH),
            build_readout=lambda _: Identity(),
            loss=cheap_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            num_microbatches=system.num_microbatches,
            split=system.split,
            costs=_costs(setting),
            options=StageOptions(clip_norm=1.0, clip_scope="global") if system.clips_globally else None,
            timeout=TIMEOUT,
        )
        self._batch = _batch(system.num_microbatches)
        self.most_in_flight = 0

    def finish(self) -> None:
        """Let the neighbours take what was sent."""
        self._pipeline.close()

    def __call__(self) -> None:
        record = self._pipeline.step(*self._batch).record
        self.most_in_flight = max(self.most_in_flight, record.most_in_flight)


def _batch(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_microbatches, WIDTH), torch.zeros(num_microbatches, WIDTH)


def _build_peer(rank: int, setting: Setting, system: System, overshoot: float) -> Step | None:
    def build_chunk(index: int, total: int) -> nn.Module:
        per_rank = total // setting.num_stages
        # Stage `index` of `total` holds 1/per_rank of the blocks of one of our stages, in the order of the chain.
        seconds = setting.seconds * setting.costs[index // per_rank] / per_rank
        return SleepingBlock(Pace(seconds, overshoot), WIDTH)

    batch = _batch(system.num_microbatches)
    try:
        return build_peer(
            system.name, rank, setting.num_stages, system.num_microbatches, build_chunk, *batch, cheap_loss
        )
    except (ValueError, RuntimeError, AssertionError):
        return None  # torch refuses this number of micro-batches


def speed_ups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our systems against torch's fastest at the same number of micro-batches."""
    found = []
    for row in rows:
        peers = [other for other in rows if other.system in PEERS and other.microbatches == row.microbatches]
        if row.system == OURS and "clip" not in row.extra and peers:
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
