"""Runs a plan: one from a file, or one made at start-up on the ranks given (`horizon: auto`)."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from mpc_dist.planner.plan import Plan
from mpc_dist.planner.search import Request
from mpc_dist.runtime.mesh import Launch, join
from mpc_dist.runtime.score import Score
from mpc_dist.training.attempt import go_on_if_begun
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.config import Config
from mpc_dist.training.job import DrawRun, train
from mpc_dist.training.planning import Probe, apply_plan, plan_for
from mpc_dist.training.resume import NEVER
from mpc_dist.training.run_lock import lock_run

PLAN_FILE = "plan.yaml"
"""In the run folder: what was run."""


def train_as_planned(
    config: Config, launch: Launch, plan_file: Path | None = None, *, draw: DrawRun | None = None
) -> tuple[Config, dict[int, Score]]:
    """Train by the plan, if there is one; the configuration that was run, and the last evaluation.

    No other job can work in the run folder meanwhile.
    """
    plan = None if plan_file is None else Plan.read(plan_file)
    with lock_run(Path(config.training.folder), rank=launch.rank):
        return _train_locked(go_on_if_begun(config, launch), launch, plan, draw)


def _train_locked(
    config: Config, launch: Launch, plan: Plan | None, draw: DrawRun | None
) -> tuple[Config, dict[int, Score]]:
    written = Path(config.training.folder) / PLAN_FILE
    if plan is None and config.horizon.mode == "auto":
        plan = _plan_at_start(config, launch)
    if plan is None:
        if launch.rank == 0:
            written.unlink(missing_ok=True)  # of another run that was in this folder
        return config, train(config, launch, draw=draw)
    planned = apply_plan(config, plan)
    if launch.world_size != planned.num_ranks:
        raise ValueError(
            f"the plan is for {planned.parallel.stages} stages x {planned.data_parallel.degree} replicas, but "
            f"{launch.world_size} processes were started; start {planned.num_ranks} (torchrun --nproc-per-node)"
        )
    if launch.rank == 0:
        plan.write(written)
    return planned, train(planned, launch, costs=plan.build_costs(), draw=draw)


def _plan_at_start(config: Config, launch: Launch) -> Plan:
    """Rank 0 measures and plans, or finds the plan that this run was begun with; all others wait for its answer."""
    join(launch, config.torch_device.type, config.parallel.timeout)
    answer: list[Plan | str | None] = [None]
    if launch.rank == 0:
        request = Request(gpu_memory=_memory_per_rank(config, launch), num_gpus=config.parallel.stages)
        try:
            answer = [_plan_before(config, launch) or plan_for(config, request, Probe()).plan]
        except ValueError as error:
            answer = [str(error)]  # every rank must hear of it, or the others would wait in vain
    if launch.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    if not isinstance(answer[0], Plan):
        raise ValueError(f"horizon auto: {answer[0]}")
    return answer[0]


def _plan_before(config: Config, launch: Launch) -> Plan | None:
    """The plan that this run was begun with and goes on with; None if it begins now, or has changed since."""
    folder = Path(config.training.folder)
    if config.checkpoints.resume == NEVER or not list_checkpoints(folder_of(folder)):
        return None
    try:
        plan = Plan.read(folder / PLAN_FILE)
        return plan if apply_plan(config, plan).num_ranks == launch.world_size else None
    except ValueError:
        return None


def _memory_per_rank(config: Config, launch: Launch) -> float:
    """A GPU's memory, or this machine's shared by the ranks."""
    if config.torch_device.type == "cuda":
        return float(torch.cuda.get_device_properties(config.torch_device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / launch.world_size
