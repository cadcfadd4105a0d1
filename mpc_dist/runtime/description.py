"""How a stage tells the next what its messages will look like, once before training."""

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_MOST_DIMENSIONS = 8


def send_description(tensor: Tensor, num_samples: int, peer: int, group: dist.ProcessGroup) -> None:
    """Tell a neighbour what tensors like this one look like, and how many samples they are of."""
    if tensor.ndim > _MOST_DIMENSIONS or tensor.dtype not in _DTYPES:
        raise ValueError(f"a stage may not pass on {tensor.ndim} dimensions of {tensor.dtype}")
    sizes = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.ndim)]
    header = torch.tensor([_DTYPES.index(tensor.dtype), num_samples, tensor.ndim, *sizes], device=tensor.device)
    dist.send(header, dst=peer, group=group)


def receive_description(
    peer: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[tuple[int, ...], torch.dtype, int]:
    """The shape and type that a neighbour announces, and the number of samples."""
    header = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64, device=device)
    dist.recv(header, src=peer, group=group)
    dtype, num_samples, num_dimensions, *sizes = header.tolist()
    return tuple(sizes[:num_dimensions]), _DTYPES[dtype], num_samples
