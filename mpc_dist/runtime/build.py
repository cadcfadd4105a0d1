"""A pipeline for a training loop of one's own, from a list of modules."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import nn

from mpc_dist.models.chain import Chain
from mpc_dist.readout import Identity, Loss
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import DEFAULT_TIMEOUT, Pipeline
from mpc_dist.runtime.stage import OptimizerFactory, StageOptions
from mpc_dist.schedule import lay_out, split_evenly
from mpc_dist.windows import Windows, expand, tumbling


def build_pipeline(
    blocks: Sequence[nn.Module],
    loss: Loss,
    *,
    horizon: int | Windows,
    optimizer: OptimizerFactory,
    num_microbatches: int = 1,
    readouts: Mapping[int, nn.Module] | None = None,
    partition: Sequence[int] | None = None,
    split: bool = False,
    options: StageOptions | None = None,
    device: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Pipeline:
    """A pipeline of these blocks over all processes that the launcher started, one stage each.

    `horizon` is a number of stages, for tumbling windows, or any windows over the blocks. Without readouts the state is
    the prediction.
    """
    launch = Launch.from_environment()
    sizes = tuple(partition) if partition is not None else split_evenly(len(blocks), launch.world_size)
    windows = horizon if isinstance(horizon, Windows) else expand(tumbling(len(sizes), horizon), sizes)
    layout = lay_out(windows, sizes)
    # On every rank, also for what it does not own: tied weights would part, and a missing readout hang the others.
    Chain(blocks, loss, readouts).check_windows(windows)
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    mesh = build_mesh(launch, num_stages=len(sizes), device_type=device_type, timeout=timeout)
    return Pipeline(
        mesh,
        layout,
        build_block=lambda t: blocks[t],
        build_readout=lambda s: Identity() if readouts is None else readouts[s],
        loss=loss,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        split=split,
        options=options,
        timeout=timeout,
    )
