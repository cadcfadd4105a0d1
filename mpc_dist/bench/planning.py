"""How long choosing a plan takes for models and machines of growing size, from made-up measurements."""

import time
from dataclasses import dataclass

import numpy as np

from mpc_dist.planner.choose import Report, choose_plan
from mpc_dist.planner.measurements import BlockCosts, Measurements, ReadoutCosts
from mpc_dist.planner.plan import Plan
from mpc_dist.planner.request import Request
from mpc_dist.profile import AngleProfile
from mpc_dist.windows import shrink, sliding

PROBE_BLOCKS = 8
"""Of the small model whose angles stand for the large one's."""
MICROBATCHES = (1, 2, 4, 8, 16)
ROOM = 4.0
"""Memory of all GPUs together, in shares of what back-propagation holds on one."""


@dataclass(frozen=True)
class PlanningTime:
    """What one plan took."""

    num_blocks: int
    """Of the model; there are as many GPUs."""
    seconds: float
    cpu_seconds: float
    """Of this process, whatever else the machine does."""
    plan: Plan


def planning_seconds(num_blocks: int) -> float:
    """Seconds of planning for so many blocks on as many GPUs."""
    return time_planning(num_blocks).seconds


def time_planning(
    num_blocks: int, *, objective: str = "time", report: Report = lambda _what, _done, _total: None
) -> PlanningTime:
    """Plan a made-up model of so many blocks on as many GPUs, a few of which could hold it."""
    measurements = made_up_measurements(num_blocks)
    one = measurements[1]
    whole = one.weight_bytes(range(num_blocks), [num_blocks]) + one.sweep_bytes(num_blocks)
    profile = made_up_angles(PROBE_BLOCKS)
    start, cpu_start = time.perf_counter(), time.process_time()
    planned = choose_plan(
        measurements,
        lambda windows: profile.cosine(shrink(windows, PROBE_BLOCKS)),
        lambda h: one.weight_bytes(range(num_blocks), sliding(num_blocks, h).readouts) + one.sweep_bytes(h),
        Request(gpu_memory=ROOM * whole / num_blocks, max_gpus=num_blocks, objective=objective),
        fingerprint={},
        report=report,
    )
    return PlanningTime(num_blocks, time.perf_counter() - start, time.process_time() - cpu_start, planned.plan)


def made_up_measurements(num_blocks: int) -> dict[int, Measurements]:
    """Blocks that differ by up to a tenth, as of a transformer 1,024 wide on a GPU, for a batch of 16 samples."""
    spread = np.random.default_rng(0).uniform(0.95, 1.05, num_blocks)
    blocks = [
        BlockCosts(0.01 * s, 0.01 * s * (t > 0), 0.01 * s, 6e8, 3e7 * (t > 0), 3e7, 5e7 * s, optimizer_bytes=1e8 * s)
        for t, s in enumerate(map(float, spread))
    ]
    readouts = (ReadoutCosts(0.002, 2e8, 1e6, optimizer_bytes=2e6),) * num_blocks
    whole = Measurements(max(MICROBATCHES), tuple(blocks), readouts, 1e-11, "made up")
    return {m: whole.cut_into(m) for m in MICROBATCHES}


def made_up_angles(num_blocks: int) -> AngleProfile:
    """Gradients of neighbouring readouts agree, those of distant ones less."""
    grams = []
    for t in range(num_blocks):
        ahead = np.arange(num_blocks - t)
        grams.append(np.exp(-4 * np.abs(ahead[:, None] - ahead[None, :]) / num_blocks))
    return AngleProfile((tuple(grams),))
