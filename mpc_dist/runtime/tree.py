"""Gathers what all ranks have along a tree, so that no rank is connected to more than a few others."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(own: T, group: dist.ProcessGroup) -> list[T] | None:
    """On the group's first rank, what every rank gave, by rank; None on the others. All of them call it.

    Rank r takes from r + 1, r + 2, r + 4, ... what each of these has from as many ranks, then passes all on:

        0 <- 1    2 <- 3    4 <- 5    6 <- 7
        0 <------ 2         4 <------ 6
        0 <------------------ 4
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    found: list[T] = [own]
    distance = 1
    while distance < num_ranks:
        if rank % (2 * distance):
            dist.send_object_list([found], dst=dist.get_global_rank(group, rank - distance), group=group)
            return None
        if rank + distance < num_ranks:
            received: list[list[T]] = [[]]
            dist.recv_object_list(received, src=dist.get_global_rank(group, rank + distance), group=group)
            found += received[0]
        distance *= 2
    return found
