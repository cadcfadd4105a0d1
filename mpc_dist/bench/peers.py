"""The schedules of torch.distributed.pipelining, as peers in a benchmark.

Schedules with several stages per rank cut a rank's work further, so that every system does the same per rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

Step = Callable[[], None]
Chunk = Callable[[int, int], nn.Module]
"""(stage, number of stages) -> that stage's module, out of all stages of the model."""

PEERS = ("torch-GPipe", "torch-1F1B", "torch-Interleaved1F1B", "torch-InterleavedZeroBubble", "torch-ZBV")


def build_peer(
    name: str,
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    build_chunk: Chunk,
    inputs: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    learning_rate: float = 0.0,
) -> Step:
    """A function that makes one optimizer step; raises ValueError where torch refuses the setting."""
    if name in ("torch-GPipe", "torch-1F1B"):
        if name == "torch-1F1B" and num_microbatches < num_ranks:
            raise ValueError(f"1F1B needs at least {num_ranks} micro-batches")
        indices, total = [rank], num_ranks
    elif name == "torch-ZBV":
        indices, total = [rank, 2 * num_ranks - 1 - rank], 2 * num_ranks
    else:
        indices, total = [rank, num_ranks + rank], 2 * num_ranks
    modules = [build_chunk(index, total) for index in indices]
    group = dist.group.WORLD
    assert group is not None
    stages: list[Any] = [
        PipelineStage(m, i, total, inputs.device, group=group) for m, i in zip(modules, indices, strict=True)
    ]
    kinds: dict[str, Any] = {
        "torch-Interleaved1F1B": ScheduleInterleaved1F1B,
        "torch-InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
        "torch-ZBV": ScheduleZBVZeroBubble,
    }
    if name in kinds:
        schedule: Any = kinds[name](stages, num_microbatches, loss_fn=loss)
    else:
        single: Any = ScheduleGPipe if name == "torch-GPipe" else Schedule1F1B
        schedule = single(stages[0], num_microbatches, loss_fn=loss)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    first, last = 0 in indices, total - 1 in indices

    def step() -> None:
        arguments: Sequence[Tensor] = (inputs,) if first else ()
        schedule.step(*arguments, **({"target": labels} if last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
