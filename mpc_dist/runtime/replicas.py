"""What the replicas of a stage must have in common: the same weights, bit for bit, and one model to be scored."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.runtime.mesh import Mesh

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaError(ValueError):
    """The replicas of a stage hold different weights, which no step makes right again."""


def sum_bits(tensor: Tensor) -> Tensor:
    """The sum of all elements, taken as whole numbers: it does not depend on the order in which they are added."""
    flat = tensor.detach().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.view(-1).view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def check_agreement(mesh: Mesh, weights: Mapping[str, Tensor]) -> None:
    """Raise on every replica of this stage if a weight is not the same on all of them; they call it together."""
    if mesh.replicas is None or not weights:
        return
    own = torch.stack([sum_bits(weight) for weight in weights.values()])
    # The largest of the sums, and the largest of their complements, which is the complement of the smallest.
    ends = torch.cat([own, ~own])
    what = "the comparison of the replicas' weights"
    with mesh.watch.waiting(mesh.replicas, what):
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=mesh.replicas)
    largest, smallest = ends[: len(own)], ~ends[len(own) :]
    if torch.equal(largest, smallest):
        return
    everyone = [torch.empty_like(own) for _ in range(mesh.num_replicas)]
    with mesh.watch.waiting(mesh.replicas, what):
        dist.all_gather(everyone, own, group=mesh.replicas)
    names = [name for name, is_odd in zip(weights, (largest != smallest).tolist(), strict=True) if is_odd]
    first = list(weights).index(names[0])
    parted = [replica for replica, sums in enumerate(everyone) if sums[first] != everyone[0][first]]
    more = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    raise ReplicaError(
        f"stage {mesh.stage}: {names[0]}{more} of replica {', '.join(map(str, parted))} differ from replica 0's; "
        "replicas must make the same updates: go on from the last checkpoint, with blocks that are the same on each"
    )


@contextmanager
def with_first_buffers(mesh: Mesh, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the first replica's running statistics be those of all within; the replicas of a stage call it together.

    Each has seen other samples. What they score together should be the one model that others would load.
    """
    buffers = [buffer for module in modules for buffer in module.buffers() if buffer.is_floating_point()]
    if mesh.replicas is None or not buffers:
        yield
        return
    own = [buffer.clone() for buffer in buffers]
    for dtype in {buffer.dtype: None for buffer in buffers}:
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.reshape(-1) for buffer in alike])
        with mesh.watch.waiting(mesh.replicas, "the first replica's buffers"):
            dist.broadcast(flat, src=mesh.stage * mesh.num_replicas, group=mesh.replicas)
        for buffer, part in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(part.view_as(buffer))
    try:
        yield
    finally:
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)
