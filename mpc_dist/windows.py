"""Which block aims at which readout: the only home of that index arithmetic.

Block t maps x(t) to x(t+1), so its output is boundary t+1; boundaries run from 1 to T, the number of blocks. A window
map is data: sliding (the paper), anchored, cumulative, tumbling, forward-forward, LoCo, back-propagation.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mpc_dist.validation import check_whole, is_whole

MAX_BLOCKS = 4_096
"""Of a model: maps hold up to all pairs of blocks, and must stay small."""

Target = tuple[int, float]
"""A boundary that carries a readout, and the weight of its loss."""


@dataclass(frozen=True)
class Windows:
    """For each block, the readouts that its weights learn from.

    The gradient of block t is the sum over its targets (s, w) of w * dL(x(s))/du(t).
    """

    targets: tuple[tuple[Target, ...], ...]
    """`targets[t]`: the (boundary, weight) pairs of block t, boundaries ascending."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("windows need at least 1 block, got none")
        for block, aims in enumerate(self.targets):
            if _is_plain(aims, block, self.num_blocks):
                continue  # the checks below take long for a thousand blocks
            boundaries = [boundary for boundary, _ in aims]
            if not boundaries:
                raise ValueError(f"block {block} aims at no readout; give it one in {block + 1}..{self.num_blocks}")
            if boundaries != sorted(set(boundaries)):
                raise ValueError(f"block {block} aims at {boundaries}; list each boundary once, ascending")
            for boundary, weight in aims:
                check_whole(f"target boundary of block {block}:", boundary, minimum=block + 1, maximum=self.num_blocks)
                if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
                    raise ValueError(
                        f"block {block} weighs the loss at boundary {boundary} by {weight}; use a positive number"
                    )

    @property
    def num_blocks(self) -> int:
        """How many blocks the map covers (T)."""
        return len(self.targets)

    @cached_property
    def readouts(self) -> tuple[int, ...]:
        """The boundaries that carry a readout, ascending."""
        return tuple(sorted({boundary for aims in self.targets for boundary, _ in aims}))

    @cached_property
    def _aiming(self) -> dict[int, tuple[int, ...]]:
        aiming: dict[int, list[int]] = {boundary: [] for boundary in self.readouts}
        for block, aims in enumerate(self.targets):
            for boundary, _ in aims:
                aiming[boundary].append(block)
        return {boundary: tuple(blocks) for boundary, blocks in aiming.items()}

    @cached_property
    def _crossing(self) -> tuple[tuple[int, ...], ...]:
        crossing: list[list[int]] = [[] for _ in self.targets]
        for readout in self.readouts:
            for block in self.blocks_crossed_by(readout):
                crossing[block].append(readout)
        return tuple(map(tuple, crossing))

    def blocks_aiming_at(self, readout: int) -> tuple[int, ...]:
        """The blocks whose weights learn from this readout, ascending."""
        return self._aiming[readout]

    def stop_of(self, readout: int) -> int:
        """The lowest block that the readout's adjoint must reach; it goes no further."""
        return self._aiming[readout][0]

    def blocks_crossed_by(self, readout: int) -> range:
        """The blocks that the readout's adjoint must pass, from its stop up to the block below the readout."""
        return range(self.stop_of(readout), readout)

    def readouts_crossing(self, block: int) -> tuple[int, ...]:
        """The readouts whose adjoints pass this block, as relay or as target, ascending."""
        return self._crossing[block]

    def weight(self, block: int, readout: int) -> float:
        """The weight of that readout's loss in the block's gradient; 0 if the block does not aim at it."""
        return dict(self.targets[block]).get(readout, 0.0)

    def is_target(self, block: int, readout: int) -> bool:
        """Whether the block's weights learn from that readout."""
        return any(boundary == readout for boundary, _ in self.targets[block])

    def relays(self, block: int) -> tuple[int, ...]:
        """The readouts whose adjoints cross this block without touching its weights, ascending."""
        return tuple(readout for readout in self.readouts_crossing(block) if not self.is_target(block, readout))

    def last_readout_crossing(self, block: int) -> int:
        """The readout after whose adjoint the block's activations can be freed."""
        return self.readouts_crossing(block)[-1]

    def describe(self) -> str:
        """Draw the map: a row per block, a column per boundary.

        `●` a target, `─` blocks between a block and its furthest target, `○` a readout that the block does not use.
        """
        columns = range(1, self.num_blocks + 1)
        width = len(str(self.num_blocks)) + 1
        blocks = "block" if self.num_blocks == 1 else "blocks"
        lines = [f"{self.num_blocks} {blocks}, readouts at {', '.join(map(str, self.readouts))}"]
        lines.append("block".rjust(6) + "".join(str(boundary).rjust(width) for boundary in columns) + "   aims at")
        for block, aims in enumerate(self.targets):
            furthest = aims[-1][0]
            cells = []
            for boundary in columns:
                on_path = block < boundary <= furthest
                mark = "●" if self.is_target(block, boundary) else "○" if boundary in self._aiming else " "
                if mark != "●" and on_path:
                    mark = "─"
                # The path runs from the block's own output (boundary t+1) to its furthest target.
                cells.append(mark.rjust(width, "─" if on_path and boundary > block + 1 else " "))
            aimed = ", ".join(str(s) if w == 1 else f"{s} (x{w:.3g})" for s, w in aims)
            lines.append(str(block).rjust(6) + "".join(cells) + "   " + aimed)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


def _is_plain(aims: tuple[Target, ...], block: int, num_blocks: int) -> bool:
    """Whether these targets of a block are certainly in order."""
    last = block
    for boundary, weight in aims:
        if type(boundary) is not int or type(weight) is not float or boundary <= last or not 0 < weight < math.inf:
            return False
        last = boundary
    return block < last <= num_blocks


def sliding(num_blocks: int, horizon: int, anchors: Iterable[int] | None = None) -> Windows:
    """Block t aims at the smallest anchor >= min(t + horizon, T).

    Without anchors every boundary carries a readout: the paper's window, g_h(u(t)) = dL(x(min(t+h, T)))/du(t).
    """
    check_horizon(horizon, num_blocks)
    boundaries = range(1, num_blocks + 1) if anchors is None else _check_anchors(anchors, num_blocks)
    reach = (min(block + horizon, num_blocks) for block in range(num_blocks))
    return Windows(tuple(((boundaries[bisect_left(boundaries, ahead)], 1.0),) for ahead in reach))


def backprop(num_blocks: int) -> Windows:
    """Every block aims at the last boundary: horizon T."""
    return sliding(num_blocks, num_blocks)


def forward_forward(num_blocks: int) -> Windows:
    """Every block aims at its own output: horizon 1, the local loss."""
    return sliding(num_blocks, 1)


def tumbling(num_blocks: int, size: int) -> Windows:
    """Every block of a group of `size` aims at the group's end; the last group may be shorter."""
    _check_size("window size", size, num_blocks)
    return Windows(tuple(((min((block // size + 1) * size, num_blocks), 1.0),) for block in range(num_blocks)))


def cumulative(num_blocks: int, horizon: int) -> Windows:
    """Block t aims at all of t+1..min(t+horizon, T), with equal weights that sum to 1."""
    check_horizon(horizon, num_blocks)
    ahead = (range(block + 1, min(block + horizon, num_blocks) + 1) for block in range(num_blocks))
    return Windows(tuple(tuple((boundary, 1.0 / len(reach)) for boundary in reach) for reach in ahead))


def loco(num_blocks: int) -> Windows:
    """LoCo as in the paper's appendix B: g(u(t)) = dL(x(t+1))/du(t) + dL(x(t+2))/du(t).

    Block 0 aims at boundary 2 only and the last block at T only.
    """
    check_whole("number of blocks for LoCo:", num_blocks, minimum=2)
    interior = tuple(((block + 1, 1.0), (block + 2, 1.0)) for block in range(1, num_blocks - 1))
    return Windows((((2, 1.0),), *interior, ((num_blocks, 1.0),)))


def expand(windows: Windows, sizes: Sequence[int]) -> Windows:
    """Windows over groups (stages) as windows over their blocks: a block aims where its group does.

    `expand(sliding(K, h), sizes)` is a horizon of h stages: its anchors are the stage boundaries.
    """
    ends = list(itertools.accumulate(sizes))
    grown = [tuple((ends[boundary - 1], weight) for boundary, weight in aims) for aims in windows.targets]
    return Windows(tuple(aims for aims, size in zip(grown, sizes, strict=True) for _ in range(size)))


def group(windows: Windows, sizes: Sequence[int]) -> Windows:
    """Windows over blocks as windows over groups of them; every readout must lie at the end of a group."""
    ends = list(itertools.accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    boundary_of = {end: index for index, end in enumerate(ends, start=1)}
    return Windows(
        tuple(tuple((boundary_of[boundary], weight) for boundary, weight in windows.targets[start]) for start in starts)
    )


def shrink(windows: Windows, num_blocks: int) -> Windows:
    """The same windows on a chain with fewer blocks, each standing for as many of these.

    What blocks of one group aim at is averaged, at the boundary of the group in which it lies.
    """
    if windows.num_blocks % num_blocks:
        raise ValueError(f"{windows.num_blocks} blocks cannot shrink to {num_blocks}; use a divisor")
    ratio = windows.num_blocks // num_blocks
    targets = []
    for start in range(0, windows.num_blocks, ratio):
        weights: dict[int, float] = {}
        for aims in windows.targets[start : start + ratio]:
            for boundary, weight in aims:
                place = -(-boundary // ratio)
                weights[place] = weights.get(place, 0.0) + weight / ratio
        targets.append(tuple(sorted(weights.items())))
    return Windows(tuple(targets))


def check_horizon(horizon: object, num_blocks: int) -> None:
    """Raise unless the horizon is a whole number of blocks that the model has."""
    _check_size("horizon", horizon, num_blocks)


def _check_size(name: str, size: object, num_blocks: int) -> None:
    check_whole("number of blocks:", num_blocks, minimum=1)
    limits = f"1..{num_blocks}"
    if not is_whole(size):
        raise ValueError(f"{name} must be a whole number of blocks, got {size!r}; use {limits}")
    if size > num_blocks:
        raise ValueError(f"{name} {size} exceeds the {num_blocks} blocks of this model; use {limits}")
    if size < 1:
        raise ValueError(f"{name} {size} sees no block ahead; use {limits}")


def _check_anchors(anchors: Iterable[int], num_blocks: int) -> list[int]:
    boundaries = list(anchors) if isinstance(anchors, Iterable) else [anchors]
    for boundary in boundaries:
        check_whole("anchor", boundary, minimum=1, maximum=num_blocks)
    if num_blocks not in boundaries:
        raise ValueError(
            f"anchors {sorted(boundaries)} leave out the last boundary, {num_blocks}, where the last block aims; add it"
        )
    return sorted(set(boundaries))
