"""Where each part of the chain runs: blocks grouped into segments, segments placed on ranks.

A segment is a run of one stage's blocks that share their windows, so that every adjoint treats them alike. On segments
the windows are again `Windows`: schedules need to know nothing of blocks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpc_dist.validation import check_whole
from mpc_dist.windows import Windows, group


@dataclass(frozen=True)
class Layout:
    """A chain of segments on a line of ranks."""

    windows: Windows
    """Which segment aims at which segment boundary."""
    ranks: tuple[int, ...]
    """`ranks[segment]`: where it runs; ascending, each rank at least once."""
    blocks: tuple[range, ...]
    """`blocks[segment]`: the blocks that it consists of."""

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """How many ranks, and so stages, there are (K)."""
        return self.ranks[-1] + 1

    @cached_property
    def segments(self) -> tuple[range, ...]:
        """`segments[rank]`: the segments on that rank."""
        starts = [s for s, rank in enumerate(self.ranks) if s == 0 or rank != self.ranks[s - 1]]
        return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], self.num_segments], strict=True))

    def stage_blocks(self, rank: int) -> range:
        """The blocks on that rank."""
        own = self.segments[rank]
        return range(self.blocks[own[0]].start, self.blocks[own[-1]].stop)

    @cached_property
    def span(self) -> int:
        """The most stages that any segment's windows reach over, its own included: the horizon in stages."""
        reach = (
            self.ranks[aims[-1][0] - 1] - self.ranks[segment] + 1 for segment, aims in enumerate(self.windows.targets)
        )
        return max(reach)


def lay_out(windows: Windows, partition: Sequence[int]) -> Layout:
    """Cut the blocks into stages of these sizes, and each stage into segments where its windows change."""
    check_partition(partition, windows.num_blocks)
    rank_of_block = [rank for rank, size in enumerate(partition) for _ in range(size)]
    sizes: list[int] = []
    ranks: list[int] = []
    for block, rank in enumerate(rank_of_block):
        # Blocks that share a stage, their targets and their relays are indistinguishable to every adjoint.
        if ranks and ranks[-1] == rank and _are_alike(windows, block - 1, block):
            sizes[-1] += 1
        else:
            sizes.append(1)
            ranks.append(rank)
    ends = list(itertools.accumulate(sizes))
    blocks = tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
    return Layout(group(windows, sizes), tuple(ranks), blocks)


def _are_alike(windows: Windows, one: int, other: int) -> bool:
    return windows.targets[one] == windows.targets[other] and windows.relays(one) == windows.relays(other)


def check_partition(partition: Sequence[int], num_blocks: int) -> None:
    """Raise unless the partition gives every block to a stage and every stage a block."""
    if not partition:
        raise ValueError(f"the partition has no stage; give sizes that sum to the model's {num_blocks} blocks")
    for stage, size in enumerate(partition):
        check_whole(f"number of blocks of stage {stage}:", size, minimum=1)
    if sum(partition) != num_blocks:
        raise ValueError(
            f"partition {'|'.join(map(str, partition))} has {sum(partition)} blocks but the model {num_blocks}; "
            "make the sizes sum to that"
        )


def split_evenly(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Stage sizes that differ by at most one; the larger ones come first."""
    check_whole("number of stages:", num_stages, minimum=1, maximum=num_blocks)
    size, extra = divmod(num_blocks, num_stages)
    return tuple(size + (stage < extra) for stage in range(num_stages))
