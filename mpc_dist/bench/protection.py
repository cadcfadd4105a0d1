"""`bench.py protection`: what all protection costs a step, with compute emulated on gloo ranks.

Without: no number is looked at, no thread runs, a wait for a neighbour is the library's alone, without a limit, a note
of whom it is for, or a look at whether the message is whole. With `stop`, as by default in training: every tensor of a
step is looked at; watcher, pulse and preemption run on every rank; the run folder is locked; waits are bounded, noted
and checked. With `skip`: the ranks also agree before each update. Threads work in bursts of up to a second apart, so a
part of a round should last for two seconds or more, and the mean over its steps counts.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpc_dist.bench.alternate import HOST, AlternatingSetting, build_emulated, compare, take_turns
from mpc_dist.bench.emulate import measure_overshoot
from mpc_dist.bench.rows import Row
from mpc_dist.runtime import transport
from mpc_dist.runtime.guard import Policy
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.preemption import Preemption
from mpc_dist.runtime.pulse import Pulse
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.training.run_lock import lock_run
from mpc_dist.training.watcher import Watcher

WIDTH, ROWS = 256, 64
"""Of a micro-batch's state: what is looked at has a size."""
TIMEOUT = timedelta(seconds=120)
GRACE = 25.0
SYSTEMS: dict[Policy, str] = {"ignore": "unprotected", "stop": "protected", "skip": "protected, skipping together"}


def bench_protection(setting: AlternatingSetting) -> list[Row]:
    """A row without protection, and rows with it and their ratios to the first."""
    # As under torchrun, the store is kept by a process that does not train.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, measure_overshoot(), Path(folder), store.port)
        ranks = run_local_ranks(_measure, setting.num_ranks, *arguments, timeout=1800.0, group_timeout=120.0)
    return compare(ranks, SYSTEMS, setting)


def _measure(
    rank: int, setting: AlternatingSetting, overshoot: float, folder: Path, port: int
) -> dict[Policy, list[float]]:
    """This rank's mean step time in every round, for each system."""
    launch = Launch(rank, setting.num_ranks, rank)
    mesh = build_mesh(launch, num_stages=setting.num_ranks, timeout=TIMEOUT)
    store = TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
    pipelines = {
        policy: build_emulated(
            mesh,
            setting,
            overshoot,
            width=WIDTH,
            timeout=TIMEOUT,
            options=StageOptions(record_times=True, on_nonfinite=policy),
        )
        for policy in SYSTEMS
    }
    times: dict[Policy, list[float]] = {policy: [] for policy in SYSTEMS}
    for _, policy in take_turns(tuple(SYSTEMS), setting.repeats):
        around = bare() if policy == "ignore" else protected(launch, mesh, folder, store)
        with around as preemption:
            times[policy].append(_time_steps(pipelines[policy], setting, preemption))
    return times


@contextmanager
def protected(launch: Launch, mesh: Mesh, folder: Path, store: TCPStore) -> Iterator[Preemption]:
    """What `train` keeps around its steps."""
    watcher = Watcher(mesh.watch, launch.rank, launch.world_size, folder, timeout=TIMEOUT.total_seconds())
    with (
        lock_run(folder, rank=launch.rank),
        Pulse(launch, store=store),
        Preemption(launch, after=0, grace=GRACE, store=store) as preemption,
        watcher,
    ):
        yield preemption
    watcher.close()


@contextmanager
def bare() -> Iterator[None]:
    """Waits as the library has them; connections that are made inside do not check messages."""

    def wait(_: object, work: dist.Work, *__: Any, **___: Any) -> None:
        work.wait()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(transport.DistributedTransport, "_wait", wait))
        stack.enter_context(mock.patch.dict(transport._MARKS, clear=True))
        yield


def _time_steps(pipeline: Pipeline, setting: AlternatingSetting, preemption: Preemption | None) -> float:
    """The mean step time of one part."""
    shape = setting.num_microbatches * ROWS, WIDTH
    batch = torch.zeros(shape), torch.zeros(shape)
    dist.barrier()
    pipeline.step(*batch)
    begin = time.perf_counter()
    for step in range(1, setting.num_steps + 1):
        if preemption is not None:
            assert preemption.begin(step), "nobody asked to stop"
        pipeline.step(*batch)
    seconds = (time.perf_counter() - begin) / setting.num_steps
    pipeline.close()
    dist.barrier()
    return seconds
