"""Averages gradients over a stage's replicas while other work goes on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.runtime.watch import Watch


class AllReduceReducer:
    """One asynchronous all-reduce per segment, started when its gradients are complete."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group = group
        self._watch = watch
        self._num_replicas = dist.get_world_size(group)
        self._under_way: list[tuple[Tensor, list[Tensor], dist.Work]] = []

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the gradients of these parameters travel."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for same in by_type.values():
            bucket = torch.cat([gradient.reshape(-1) for gradient in same])
            work = dist.all_reduce(bucket, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((bucket, same, work))

    def finish(self) -> None:
        """Wait for all of them and put the averages in place."""
        for bucket, gradients, work in self._under_way:
            with self._watch.waiting(self._group, "the average of the replicas' gradients"):
                work.wait()
            bucket /= self._num_replicas
            parts = torch.split_with_sizes(bucket, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        self._under_way.clear()
