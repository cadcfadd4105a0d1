"""What cannot be held in memory is refused before anything of it is allocated."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from mpc_dist.models import HuggingFace
from mpc_dist.task import Task
from mpc_dist.training.config import Config
from mpc_dist.validation import check_memory


def check_stage_size(config: Config, task: Task, stage: int) -> None:
    """Raise if the blocks of this stage, or a batch, would not fit a rank's device even alone."""
    first = sum(config.partition[:stage])
    check_size(config, task, range(first, first + config.partition[stage]))


def check_size(config: Config, task: Task, blocks: Sequence[int]) -> None:
    """Raise if these blocks with their gradients, or a batch of inputs, are larger than the device's memory."""
    limit = None
    if config.torch_device.type == "cuda":
        limit = float(torch.cuda.get_device_properties(config.torch_device).total_memory)
    item = config.torch_dtype.itemsize
    sample = math.prod(task.input_shape)
    check_memory(
        f"batch_size {config.batch_size} of inputs of shape {task.input_shape}",
        float(config.batch_size) * sample * item,
        "use a smaller batch_size, or smaller samples",
        limit=limit,
    )
    if isinstance(config.model, HuggingFace) and config.model.path is not None:
        return  # its sizes are those of files that exist
    copies = 1 if config.lora.r else 2  # weights, and gradients if they are trained
    total = 0.0
    for block in blocks:
        total += copies * item * _count_weights(config, task, block)
        check_memory(
            f"model: the weights and gradients of blocks {blocks[0]}..{block}",
            total,
            "use a smaller model, or more parallel.stages",
            limit=limit,
        )


def _count_weights(config: Config, task: Task, block: int) -> int:
    model = config.model
    fields = {field.name for field in dataclasses.fields(model)}  # type: ignore[arg-type]
    # A copy: what a model keeps of its files must not be of this device.
    bare = dataclasses.replace(model, **({"checkpoint": None} if "checkpoint" in fields else {}))  # type: ignore[type-var]
    with torch.device("meta"):
        parts = [bare.build_block(block, task)]
        if block == model.num_blocks - 1:
            parts.append(bare.build_head(model.num_blocks, task))
    return sum(parameter.numel() for part in parts for parameter in part.parameters())
