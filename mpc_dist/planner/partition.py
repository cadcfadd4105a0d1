"""Blocks to contiguous stages: the partition whose slowest stage is fastest, under a limit on each rank's memory.

A stage's cost depends on its blocks and, with windows counted in stages, on its position: adjoints cross it as relays.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpc_dist.planner.measurements import Measurements
from mpc_dist.schedule import lay_out
from mpc_dist.schedule.work import Work
from mpc_dist.windows import Windows

Matrix = NDArray[np.float64]
StageCosts = Callable[[int], Matrix]
"""stage -> a matrix whose [i, j] is the cost of blocks i..j-1 on that stage; infinity where it cannot be."""


def partition_blocks(num_blocks: int, num_stages: int, stage_costs: StageCosts) -> tuple[int, ...] | None:
    """Stage sizes that minimise the largest cost, by dynamic programming; None if there are none."""
    if num_stages > num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot fill {num_stages} stages; use at most {num_blocks}")
    blocks = np.arange(num_blocks + 1)
    is_stage = blocks[:, None] < blocks[None, :]
    best = np.where(blocks == 0, 0.0, np.inf)  # of the first j blocks on the stages so far
    cuts = []
    for stage in range(num_stages):
        worst = np.where(is_stage, np.maximum(best[:, None], stage_costs(stage)), np.inf)
        cuts.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    ends = [num_blocks]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return tuple(end - start for start, end in itertools.pairwise(reversed(ends)))


@dataclass(frozen=True)
class StagePricer:
    """The true cost of any stage under given windows: forwards, relays, backwards, readouts, the update."""

    measurements: Measurements
    windows: Windows
    """Over stages, or over blocks."""
    is_over_stages: bool
    num_microbatches: int
    in_flight: tuple[int, ...]
    """How many micro-batches each rank holds at once."""
    memory_limit: float = np.inf
    checkpoint: bool = False

    def __call__(self, stage: int) -> Matrix:
        """[i, j]: seconds per step of blocks i..j-1 on this stage; infinity beyond the memory."""
        # Most stages are alike: a thousand blocks make large matrices.
        alike = self.in_flight[stage], self._relays[stage] if self.is_over_stages else 0, self._is_read(stage)
        if alike not in self._matrices:
            self._matrices[alike] = self._price(stage)
        return self._matrices[alike]

    @cached_property
    def _matrices(self) -> dict[tuple[int, int, bool], Matrix]:
        return {}

    def _is_read(self, stage: int) -> bool:
        return self.is_over_stages and stage + 1 in self.windows.readouts

    def _price(self, stage: int) -> Matrix:
        seconds = self.num_microbatches * self._seconds(stage) + self._span(
            [self.measurements.update_seconds([t]) for t in range(self.measurements.num_blocks)]
        )
        return np.where(self.bytes_on(stage) <= self.memory_limit, seconds, np.inf)

    def _seconds(self, stage: int) -> Matrix:
        blocks = self.measurements.blocks
        relays = (self._relays[stage],) * len(blocks) if self.is_over_stages else self._relays
        again = 1.0 if self.checkpoint else 0.0
        per_block = [
            b.forward + b.input_grad * (1 + relay) + b.weight_grad + again * b.forward * (1 + relay)
            for b, relay in zip(blocks, relays, strict=True)
        ]
        return self._span(per_block) + self._readouts(stage, [r.seconds for r in self.measurements.readouts])

    @cached_property
    def _relays(self) -> tuple[int, ...]:
        """How many adjoints cross each stage or block as relays."""
        work = Work(lay_out(self.windows, [1] * self.windows.num_blocks), 1, False)
        return tuple(_num_relays(work, unit) for unit in range(self.windows.num_blocks))

    def bytes_on(self, stage: int) -> Matrix:
        """[i, j]: the bytes of blocks i..j-1 on this stage."""
        blocks, readouts = self.measurements.blocks, self.measurements.readouts
        factor = self.measurements.bytes_per_weight_byte
        weights = self._span([block.parameter_bytes * factor + block.fixed_bytes for block in blocks])
        heads = self._readouts(stage, [r.parameter_bytes * factor + r.fixed_bytes for r in readouts])
        if self.checkpoint:
            held = self._span([0.0, *(block.output_bytes for block in blocks[:-1])])
            passing = max(block.saved_bytes for block in blocks)
        else:
            held = self._span([block.saved_bytes for block in blocks])
            held = held + np.array([*(block.shared_input_bytes for block in blocks), 0.0])[:, None]
            passing = 0.0
        read = self._readouts(stage, [readout.saved_bytes for readout in readouts])
        return weights + heads + self.in_flight[stage] * held + np.maximum(read, passing)

    def _span(self, per_block: Sequence[float]) -> Matrix:
        total = np.concatenate([[0.0], np.cumsum(per_block)])
        matrix: Matrix = total[None, :] - total[:, None]
        return matrix

    def _readouts(self, stage: int, per_boundary: Sequence[float]) -> Matrix:
        """[i, j]: the sum over the readouts that blocks i..j-1 end in."""
        if self.is_over_stages:
            at_end = np.array([0.0, *per_boundary]) if self._is_read(stage) else 0.0
            return np.zeros((len(per_boundary) + 1,) * 2) + at_end
        read = set(self.windows.readouts)
        return self._span([value if s in read else 0.0 for s, value in enumerate(per_boundary, start=1)])


def _num_relays(work: Work, segment: int) -> int:
    return sum(work.is_relayed(segment, readout) for readout in work.layout.windows.readouts_crossing(segment))


def parse_partition(text: str, num_blocks: int) -> tuple[int, ...]:
    """A layout given by hand, e.g. 4|4|6|2."""
    try:
        sizes = tuple(int(word) for word in text.split("|"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or sum(sizes) != num_blocks:
        raise ValueError(
            f"layout {text!r} must be stage sizes such as 4|4|6|2 whose sum is the model's {num_blocks} blocks"
        )
    return sizes
