"""Runs a plan: one from a file, or one made at start-up on the ranks given (`horizon: auto`)."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from mpc_dist.planner.plan import Plan
from mpc_dist.planner.search import Request
from mpc_dist.runtime.mesh import Launch, join
from mpc_dist.runtime.stage import Score
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.config import Config
from mpc_dist.training.loop import DrawRun, train
from mpc_dist.training.planning import Probe, apply_plan, plan_for
from mpc_dist.training.resume import NEVER


def train_as_planned(
    config: Config, launch: Launch, plan_file: Path | None = None, *, draw: DrawRun | None = None
) -> tuple[Config, dict[int, Score]]:
    """Train by the plan, if there is one; the configuration that was run, and the last evaluation."""
    if plan_file is not None:
        plan = Plan.read(plan_file)
    elif config.horizon.mode == "auto":
        plan = _plan_before(config, launch) or _plan_at_start(config, launch)
    else:
        return config, train(config, launch, draw=draw)
    planned = apply_plan(config, plan)
    if launch.world_size != planned.num_ranks:
        raise ValueError(
            f"the plan is for {planned.parallel.stages} stages x {planned.data_parallel.degree} replicas, but "
            f"{launch.world_size} processes were started; start {planned.num_ranks} (torchrun --nproc-per-node)"
        )
    if launch.rank == 0:
        plan.write(Path(config.training.folder) / "plan.yaml")
    return planned, train(planned, launch, costs=plan.build_costs(), draw=draw)


def _plan_before(config: Config, launch: Launch) -> Plan | None:
    """The plan that this run was begun with and goes on with; None if it begins now, or other ranks were started."""
    folder = Path(config.training.folder)
    is_begun = config.checkpoints.resume != NEVER and bool(list_checkpoints(folder_of(folder)))
    if not is_begun or not (folder / "plan.yaml").exists():
        return None
    plan = Plan.read(folder / "plan.yaml")
    return plan if plan.chosen.num_gpus * config.data_parallel.degree == launch.world_size else None


def _plan_at_start(config: Config, launch: Launch) -> Plan:
    """Rank 0 measures and plans; all others wait for its answer."""
    join(launch, config.torch_device.type, config.parallel.timeout)
    answer: list[Plan | str | None] = [None]
    if launch.rank == 0:
        request = Request(gpu_memory=_memory_per_rank(config, launch), num_gpus=config.parallel.stages)
        try:
            answer = [plan_for(config, request, Probe()).plan]
        except ValueError as error:
            answer = [str(error)]  # every rank must hear of it, or the others would wait in vain
    if launch.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    if not isinstance(answer[0], Plan):
        raise ValueError(f"horizon auto: {answer[0]}")
    return answer[0]


def _memory_per_rank(config: Config, launch: Launch) -> float:
    """A GPU's memory, or this machine's shared by the ranks."""
    if config.torch_device.type == "cuda":
        return float(torch.cuda.get_device_properties(config.torch_device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / launch.world_size
