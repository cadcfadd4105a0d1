"""`bench.py tracking`: what tracking costs a step, with compute emulated on gloo ranks and a line per step and rank.

Tracked and untracked steps both write their metrics files. When tracked, every line also goes to rank 0, which reports
it to a real W&B run, offline. The same processes alternate between the two, so that whatever else the machine does hits
both alike. Starting W&B comes before the clock; the mean over many steps counts, not the median, since tracking works
in bursts.
"""

import math
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpc_dist.bench.alternate import HOST, AlternatingSetting, build_emulated, compare, take_turns
from mpc_dist.bench.emulate import measure_overshoot
from mpc_dist.bench.rows import Row
from mpc_dist.models import ResMLP
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.training.config import Config
from mpc_dist.training.journal import open_journal
from mpc_dist.training.loop import measure_bubble
from mpc_dist.training.metrics import MetricsFile
from mpc_dist.training.tracking import TrackingConfig

WIDTH = 16
LEAD_IN_SECONDS = 1.5
"""Of steps before the clock starts: by then as many lines are reported as are written."""
TIMEOUT = timedelta(seconds=60)
START_SECONDS = 60.0


def bench_tracking(setting: AlternatingSetting) -> list[Row]:
    """A row without tracking, and one with it and its ratio to the first."""
    TrackingConfig(wandb=True).check_installed()
    # As under torchrun, the store is kept by a process that does not train.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, measure_overshoot(), Path(folder), store.port)
        ranks = run_local_ranks(_measure, setting.num_ranks, *arguments, timeout=1800.0, group_timeout=120.0)
    return compare(ranks, {False: "untracked", True: "W&B offline"}, setting)


def _measure(
    rank: int, setting: AlternatingSetting, overshoot: float, folder: Path, port: int
) -> dict[bool, list[float]]:
    """This rank's mean step time in every round, without and with tracking."""
    store = TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
    mesh = build_mesh(Launch(rank, setting.num_ranks, rank), num_stages=setting.num_ranks, timeout=TIMEOUT)
    options = StageOptions(record_times=True)
    pipeline = build_emulated(mesh, setting, overshoot, width=WIDTH, timeout=TIMEOUT, options=options)
    times: dict[bool, list[float]] = {False: [], True: []}
    for repeat, is_tracked in take_turns((False, True), setting.repeats):
        part = folder / f"{repeat}-{is_tracked}"
        times[is_tracked].append(_time_steps(rank, pipeline, setting, store, part, is_tracked=is_tracked))
    pipeline.close()
    return times


def _time_steps(
    rank: int, pipeline: Pipeline, setting: AlternatingSetting, store: TCPStore, folder: Path, *, is_tracked: bool
) -> float:
    """The mean step time of a job of its own."""
    num_ranks, num_microbatches = setting.num_ranks, setting.num_microbatches
    tracking = TrackingConfig(wandb=is_tracked, mode="offline")
    batch = torch.zeros(num_microbatches, WIDTH), torch.zeros(num_microbatches, WIDTH)
    dist.barrier()
    with open_journal(tracking, rank=rank, num_ranks=num_ranks, folder=folder, store=store) as journal:
        metrics = MetricsFile(folder, rank, journal.put)
        metrics.write(
            event="start",
            config=Config(model=ResMLP(num_blocks=num_ranks), tracking=tracking).as_dict(),
            num_stages=num_ranks,
            num_replicas=1,
            device="cpu",
            partition=[1] * num_ranks,
            windows=pipeline.layout.windows.targets,
        )
        if is_tracked and rank == 0:
            _wait_for_start(folder)

        def step(number: int) -> None:
            start = time.perf_counter()
            result = pipeline.step(*batch)
            seconds = time.perf_counter() - start
            metrics.write(
                event="step",
                step=number,
                losses=result.losses,
                step_seconds=seconds,
                samples_per_second=num_microbatches / seconds,
                bubble=measure_bubble(result.record),
                in_flight=result.record.most_in_flight,
                seconds_waiting_for_head=0.0,
            )

        # All ranks must make the same number of steps.
        num_lead_in = math.ceil(LEAD_IN_SECONDS / (3 * num_microbatches * setting.seconds))
        dist.barrier()
        for number in range(num_lead_in):
            step(number)
        begin = time.perf_counter()
        for number in range(setting.num_steps):
            step(num_lead_in + number)
        return (time.perf_counter() - begin) / setting.num_steps


def _wait_for_start(folder: Path) -> None:
    """Until W&B's run has begun: what starting costs is not the price of a step."""
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "wandb" / "run_id").exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"W&B did not start within {START_SECONDS:.0f} s")
        time.sleep(0.1)
