"""One rank of many, alone in its process: what it asks of its groups is written down and done at once.

The order of a rank's calls does not depend on what others send, as long as that has the right shape: the real mesh,
transport, executor and pipeline run, and only the groups are stand-ins.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

HEADER = 11
"""Numbers that describe a message: see `mpc_dist.runtime.description`."""


class Done:
    """A transfer that has ended."""

    def wait(self, _: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Never known, as gloo's is: so every wait that may come, comes."""
        return False


@dataclass(frozen=True)
class Others:
    """What the other ranks would answer."""

    shape: Sequence[int]
    """Of every message."""
    dtype_index: int = 0
    num_shared: int = 0
    """Of the readouts of others that are shared."""

    def answer(self, name: str, arguments: Sequence[Any]) -> Done:
        """Put it in place."""
        tensor = arguments[0][0] if isinstance(arguments[0], list | tuple) else arguments[0]
        if name == "recv":
            self._fill(tensor)
        elif name == "allreduce" and tensor.dtype == torch.int64 and not tensor.ndim:
            tensor += self.num_shared
        elif name == "allgather":
            for parts, own in zip(arguments[0], arguments[1], strict=True):
                for part in parts:
                    part.copy_(own)
        return Done()

    def _fill(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.int64 and tensor.numel() == HEADER:
            sizes = [*self.shape, *[0] * (HEADER - 3 - len(self.shape))]
            tensor.copy_(torch.tensor((self.dtype_index, self.shape[0], len(self.shape), *sizes)))
        else:
            tensor.fill_(1)


@contextmanager
def alone(rank: int, num_ranks: int) -> Iterator[None]:
    """Be that rank of so many, none of which exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
