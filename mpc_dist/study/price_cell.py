"""What a step costs on a pipeline: simulated time and bytes per rank, and what the simulator leaves out, measured.

Times are counted operations, scaled so that an average stage's forward of the whole batch takes a given time. The
batch is fixed: more micro-batches are smaller ones. Every action then costs a fixed overhead on top, which
`CalibrationCell` finds by running schedules on real ranks (as `launch/bench.py schedule` does).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpc_dist.bench.schedule import OURS, Setting, bench_schedule, parse_windows
from mpc_dist.data import Batches, DataSource
from mpc_dist.models import BlockModel, build_chain
from mpc_dist.planner.measurements import Measurements
from mpc_dist.planner.pricing import predict_bytes
from mpc_dist.profile.blocks import measure_blocks
from mpc_dist.schedule import Costs, Layout, Schedule, build_schedule, lay_out, simulate, split_evenly
from mpc_dist.schedule.action import COMPUTE
from mpc_dist.study.cell import Result
from mpc_dist.study.stage_cells import StagedWindows
from mpc_dist.study.training_cell import keep_digits
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.sections import OptimizerConfig

OVERHEADS = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
"""Seconds per action for which steps are simulated; between them, times are interpolated."""
FLOPS = 1e9
"""Any speed: times are scaled afterwards."""


@dataclass(frozen=True)
class PriceCell:
    """Step time and bytes of one way to run a step, for several numbers of micro-batches."""

    model: BlockModel
    data: DataSource
    windows: StagedWindows
    optimizer: OptimizerConfig
    batch_size: int
    microbatches: tuple[int, ...]
    split: bool
    """Whether backwards are cut into halves."""
    checkpoint: bool = False
    """Whether every block keeps its input only and runs again in backward."""
    stage_seconds: float = 0.08
    """An average stage's forward of the whole batch, readouts not counted."""
    latency: float = 5e-4
    """Seconds per message between ranks."""

    def run(self) -> Result:
        """Per number of micro-batches: seconds for each overhead, and the bytes of the fullest rank."""
        data = self.data.load()
        chain = build_chain(self.model, data.task)
        batch = next(Batches(data.train, batch_size=self.batch_size, seed=0))
        counted = measure_blocks(
            chain, *batch, partial(build_optimizer, self.optimizer, blocks=chain.blocks), flops_per_second=FLOPS
        )
        num_stages = self.windows.num_stages
        scale = self.stage_seconds * num_stages / sum(block.forward for block in counted.blocks)
        whole = scale_times(counted, scale)
        partition = split_evenly(self.model.num_blocks, num_stages)
        layout = lay_out(self.windows.build(self.model.num_blocks), partition)
        return {
            "overheads": list(OVERHEADS),
            "readout_share": keep_digits(whole.readouts[-1].seconds / self.stage_seconds, 4),
            "prices": {str(m): self._price(whole.cut_into(m), layout, m) for m in self.microbatches},
        }

    def _price(self, part: Measurements, layout: Layout, num_microbatches: int) -> Result:
        costs = part.segment_costs(layout, checkpoint=self.checkpoint, latency=self.latency)
        schedule = build_schedule(layout, num_microbatches, split=self.split, costs=costs)
        found = [simulate(schedule, layout, add_overhead(costs, overhead, split=self.split)) for overhead in OVERHEADS]
        return {
            "seconds": [keep_digits(one.step_time) for one in found],
            "in_flight": max(found[0].in_flight),
            "live_bytes": max(found[0].peak_bytes),
            "rank_bytes": max(predict_bytes(part, layout, schedule, found[0])),
        }


def scale_times(measured: Measurements, factor: float) -> Measurements:
    """The same model on a machine whose every operation takes `factor` times as long."""
    blocks = [
        replace(b, forward=b.forward * factor, input_grad=b.input_grad * factor, weight_grad=b.weight_grad * factor)
        for b in measured.blocks
    ]
    readouts = [replace(r, seconds=r.seconds * factor) for r in measured.readouts]
    return replace(measured, blocks=tuple(blocks), readouts=tuple(readouts))


def add_overhead(costs: Costs, overhead: float, *, split: bool) -> Costs:
    """Every action takes so much longer; a weight half is an action of its own where backwards are split."""
    return replace(
        costs,
        forward=tuple(time + overhead for time in costs.forward),
        input_grad=tuple(time + overhead for time in costs.input_grad),
        weight_grad=tuple(time + overhead * split for time in costs.weight_grad),
    )


def interpolate(price: Result, overheads: Sequence[float], overhead: float) -> float:
    """A step's seconds at an overhead per action."""
    return float(np.interp(overhead, overheads, price["seconds"]))


@dataclass(frozen=True)
class CalibrationCell:
    """Schedules on local gloo ranks with emulated compute, ours and torch's, beside the simulator's prediction."""

    runs_alone: ClassVar[bool] = True

    num_stages: int
    microbatches: tuple[int, ...]
    windows: tuple[tuple[str, bool], ...]
    peers: tuple[str, ...]
    seconds: float
    """One stage's forward of one micro-batch."""
    repeats: int
    repeat_seconds: float
    latency: float = 5e-4

    def run(self) -> Result:
        """A row per system; ours with its overhead per action: (measured - simulated) / actions of the busiest rank."""
        setting = Setting(
            num_stages=self.num_stages,
            microbatches=self.microbatches,
            windows=self.windows,
            peers=self.peers,
            seconds=self.seconds,
            costs=(1.0,) * self.num_stages,
            repeats=self.repeats,
            repeat_seconds=self.repeat_seconds,
            latency=self.latency,
        )
        rows = [asdict(row) for row in bench_schedule(setting)]
        return {"rows": [self._describe(row) for row in rows if "clip" not in row["extra"]]}

    def _describe(self, row: dict[str, Any]) -> Result:
        found = {name: row[name] for name in ("system", "windows", "split", "microbatches")}
        found["seconds"] = keep_digits(row["step_seconds"], 5)
        if row["system"] != OURS:
            return found
        simulated, num_actions = self._simulate(row["windows"], row["split"], row["microbatches"])
        found |= {"simulated": keep_digits(simulated, 5), "num_actions": num_actions}
        return found | {"overhead": keep_digits((row["step_seconds"] - simulated) / num_actions, 4)}

    def _simulate(self, windows: str, split: bool, num_microbatches: int) -> tuple[float, int]:
        """Step seconds, and actions of the rank with most."""
        layout = lay_out(parse_windows(windows, self.num_stages), [1] * self.num_stages)
        costs = Costs.uniform([self.seconds] * self.num_stages, latency=self.latency)
        schedule = build_schedule(layout, num_microbatches, split=split, costs=costs)
        return simulate(schedule, layout, costs).step_time, count_actions(schedule)


def count_actions(schedule: Schedule) -> int:
    """Compute actions of the rank that has most."""
    return max(sum(action.op in COMPUTE for action in program) for program in schedule.programs)


def calibrated_overhead(result: Result) -> float:
    """The median overhead per action of our systems, in seconds; within what was simulated."""
    median = float(statistics.median(row["overhead"] for row in result["rows"] if "overhead" in row))
    return min(max(OVERHEADS[0], median), OVERHEADS[-1])


def torch_ratio(result: Result, num_microbatches: int) -> float | None:
    """Torch's fastest zero-bubble schedule against our split back-propagation, both measured.

    Between the numbers of micro-batches that were run it is interpolated, in their logarithm; None if none was run.
    """
    ours = {
        row["microbatches"]: row["seconds"]
        for row in result["rows"]
        if row["system"] == OURS and row["windows"] == "backprop" and row["split"]
    }
    fastest: dict[int, float] = {}
    for row in result["rows"]:
        m = row["microbatches"]
        if row["system"] != OURS and m in ours:
            fastest[m] = min(row["seconds"] / ours[m], fastest.get(m, math.inf))
    if not fastest:
        return None
    counts = sorted(fastest)
    return float(np.interp(np.log2(num_microbatches), np.log2(counts), [fastest[count] for count in counts]))
