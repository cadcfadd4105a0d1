"""The last stage's head on every rank that reads a loss through it: sent down after each of its updates.

This is exact, and ties every reading rank to the last one: none can begin a step before the last has ended the one
before. What that costs is counted.
"""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.readout import Shared
from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.watch import Wait, Watch


class SharedHead:
    """One rank's copy of the head; on the last stage, the head itself."""

    def __init__(self, head: nn.Module, *, source: int, rank: int, group: dist.ProcessGroup, watch: Watch) -> None:
        self._tensors = [tensor for tensor in (*head.parameters(), *head.buffers()) if tensor.is_floating_point()]
        self._source = source
        self._rank = rank
        self._group = group
        self._watch = watch
        self._under_way: tuple[dist.Work, Tensor] | None = None
        self.seconds_waiting = 0.0
        """Time spent waiting for the head so far."""

    def start(self) -> None:
        """The last stage has new weights to send; the others will take them."""
        self.finish()
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors])
        work = dist.broadcast(flat, src=self._source, group=self._group, async_op=True)
        assert work is not None
        self._under_way = work, flat

    def finish(self) -> None:
        """Wait until the weights are here, at most the group's timeout."""
        if self._under_way is None:
            return
        work, flat = self._under_way
        self._under_way = None
        # The last stage sends to all readers; each of them waits for the last stage only.
        members = dist.get_process_group_ranks(self._group)
        peers = [rank for rank in members if rank != self._rank] if self._rank == self._source else [self._source]
        what = f"the shared head of rank {self._source}"
        self._watch.wait = wait = Wait(tuple(peers), what)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._watch.give_up(wait, error, f"waiting for {what}") from error
        self._watch.end(wait)
        if self._rank != self._source:
            self.seconds_waiting += time.perf_counter() - wait.since
            parts = torch.split(flat, [tensor.numel() for tensor in self._tensors])
            with torch.no_grad():
                for tensor, part in zip(self._tensors, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def leave(self) -> None:
        """Give up the group, with its threads and connections, once every member has finished."""
        dist.destroy_process_group(self._group)
        del self._group  # the stage that held this may wait for the garbage collector


def share_head(mesh: Mesh, readers: frozenset[int], readouts: Mapping[int, nn.Module], last: int) -> SharedHead | None:
    """Tie this rank's shared readouts to the last stage's head; None if this rank has none to tie.

    `readers` are the stages that read a loss. All ranks call it: they make the groups together.
    """
    num_shared = torch.tensor(sum(isinstance(readout, Shared) for readout in readouts.values()), device=mesh.device)
    with mesh.watch.waiting(mesh.stages, "the number of shared heads"):
        dist.all_reduce(num_shared, group=mesh.stages)
    if not num_shared:
        return None
    own = None
    stages = sorted(readers | {mesh.num_stages - 1})
    if len(stages) == 1:
        return None
    for replica in range(mesh.num_replicas):
        ranks = [stage * mesh.num_replicas + replica for stage in stages]
        group = dist.new_group(ranks, timeout=mesh.timeout)
        own = group if replica == mesh.replica else own
    if mesh.stage not in stages:
        return None
    assert own is not None
    shared = [readout for readout in readouts.values() if isinstance(readout, Shared)]
    head = readouts[last] if last in readouts else shared[0].head
    for readout in shared:
        readout.point_to(head)
    ranks_of_stages = mesh.ranks_of_stages
    return SharedHead(head, source=ranks_of_stages[-1], rank=ranks_of_stages[mesh.stage], group=own, watch=mesh.watch)
