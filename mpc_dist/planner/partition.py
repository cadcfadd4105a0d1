"""Blocks to contiguous stages: the partition whose slowest stage is fastest, under a limit on each rank's memory.

A stage's cost depends on its blocks and, with windows counted in stages, on its position: adjoints cross it as relays.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpc_dist.planner.measurements import BlockCosts, Measurements, ReadoutCosts
from mpc_dist.schedule import split_evenly
from mpc_dist.windows import Windows

Matrix = NDArray[np.float64]
Places = NDArray[np.int64]
ROUNDING = 1 + 1e-9
"""A bound may be missed by the rounding of sums."""


class StageCosts(Protocol):
    """What stages cost, by their blocks."""

    def __call__(self, stage: int, starts: Places, ends: Places) -> Matrix:
        """The costs of blocks start..end-1 on that stage, broadcast; infinity where they cannot be."""

    def widest(self, stage: int, bound: float) -> int:
        """No more blocks than this cost at most the bound on that stage."""

    def kind(self, stage: int) -> Hashable:
        """Stages of one kind cost the same."""


def partition_blocks(num_blocks: int, num_stages: int, stage_costs: StageCosts) -> tuple[int, ...] | None:
    """Stage sizes that minimise the largest cost, by dynamic programming; None if there are none.

    A stage that costs more than the slowest of some partition is in no best one, so wide stages are not looked at.
    """
    if num_stages > num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot fill {num_stages} stages; use at most {num_blocks}")
    bound = slowest_stage(split_evenly(num_blocks, num_stages), stage_costs)
    if num_stages == num_blocks:  # the only one there is
        return (1,) * num_blocks if math.isfinite(bound) else None
    bands: dict[Hashable, Matrix] = {}
    most = num_blocks - num_stages + 1  # every other stage needs a block, too
    nothing = np.full(most + num_blocks + 1, np.inf)
    best = nothing.copy()  # [most + j]: of the first j blocks on the stages so far
    best[most] = 0.0
    places = np.arange(num_blocks + 1)[:, None] + np.arange(most)
    cuts = []
    for stage in range(num_stages):
        kind = stage_costs.kind(stage)
        if kind not in bands:
            bands[kind] = _band(stage, num_blocks, min(most, stage_costs.widest(stage, bound)), stage_costs)
        band = bands[kind][stage + 1 : stage + 1 + most]
        # Row j, column w: block j - width + w begins the stage that ends before block j.
        worst = np.maximum(best[places[stage + 1 : stage + 1 + most, most - band.shape[1] :]], band)
        cuts.append(worst.argmin(axis=1) - band.shape[1])
        best = nothing.copy()
        best[most + stage + 1 : most + stage + 1 + most] = worst.min(axis=1)
    if not np.isfinite(best[-1]):
        return None
    ends = [num_blocks]
    for stage in reversed(range(num_stages)):
        ends.append(ends[-1] + int(cuts[stage][ends[-1] - stage - 1]))
    return tuple(end - start for start, end in itertools.pairwise(reversed(ends)))


def slowest_stage(sizes: Sequence[int], stage_costs: StageCosts) -> float:
    """The largest cost of any stage of this partition."""
    ends = [0, *itertools.accumulate(sizes)]
    by_kind: dict[Hashable, list[int]] = {}
    for stage in range(len(sizes)):
        by_kind.setdefault(stage_costs.kind(stage), []).append(stage)
    return max(
        float(stage_costs(alike[0], np.array([ends[k] for k in alike]), np.array([ends[k + 1] for k in alike])).max())
        for alike in by_kind.values()
    )


def _band(stage: int, num_blocks: int, width: int, stage_costs: StageCosts) -> Matrix:
    """[j, w]: the cost of blocks j - width + w .. j - 1 on this stage."""
    width = max(1, width)
    ends = np.arange(num_blocks + 1)[:, None]
    starts = ends - width + np.arange(width)[None, :]
    return np.where(starts >= 0, stage_costs(stage, starts.clip(0), np.broadcast_to(ends, starts.shape)), np.inf)


@dataclass(frozen=True)
class UnitWindows:
    """Windows over stages or over blocks, with what a stage's cost needs to know of them."""

    windows: Windows
    is_over_stages: bool

    @cached_property
    def relays(self) -> tuple[int, ...]:
        """How many adjoints cross each stage or block as relays."""
        return count_relays(self.windows)

    @cached_property
    def reach(self) -> int:
        """How many stages or blocks the windows look ahead at most."""
        return furthest(self.windows)

    @cached_property
    def readouts(self) -> frozenset[int]:
        """The boundaries of stages or blocks at which a loss is read."""
        return frozenset(self.windows.readouts)


@dataclass(frozen=True)
class StagePricer:
    """The true cost of any stage under given windows: forwards, relays, backwards, readouts, the update."""

    measurements: Measurements
    units: UnitWindows
    num_microbatches: int
    in_flight: tuple[int, ...]
    """How many micro-batches each rank holds at once."""
    memory_limit: float = np.inf
    checkpoint: bool = False
    has_replicas: bool = False
    """Whether a bucket is held for every gradient."""

    def __call__(self, stage: int, starts: Places, ends: Places) -> Matrix:
        """Seconds per step of blocks start..end-1 on this stage; infinity beyond the memory."""
        seconds = self._seconds(stage)
        found = seconds[ends] - seconds[starts]
        if self._is_read(stage):
            found = found + self.num_microbatches * self._reading_seconds[ends]
        if self.memory_limit == np.inf:
            return found
        return np.where(self.bytes_on(stage, starts, ends) <= self.memory_limit, found, np.inf)

    def widest(self, stage: int, bound: float) -> int:
        """By the blocks' seconds, weights and activations alone, which only grow with the blocks."""
        limits = [(self._seconds(stage), bound), (self._weights, self.memory_limit)]
        limits.append((self.in_flight[stage] * self._held, self.memory_limit))
        widths = [
            int((np.arange(len(total)) - np.searchsorted(total, total - limit * ROUNDING)).max())
            for total, limit in limits
            if limit != np.inf
        ]
        return min(widths, default=len(self.measurements.blocks))

    def kind(self, stage: int) -> Hashable:
        """Most stages are alike: what they hold counts only where memory is limited."""
        held = 0 if self.memory_limit == np.inf else self.in_flight[stage]
        return held, self.units.relays[stage] if self.units.is_over_stages else 0, self._is_read(stage)

    def _is_read(self, stage: int) -> bool:
        return self.units.is_over_stages and stage + 1 in self.units.readouts

    @cached_property
    def _update(self) -> Matrix:
        sizes = [block.parameter_bytes for block in self.measurements.blocks]
        return self.measurements.update_seconds_per_byte * np.array(sizes)

    @cached_property
    def _seconds_by_relays(self) -> dict[int, Matrix]:
        return {}

    def _seconds(self, stage: int) -> Matrix:
        """Of all blocks before each block; what is read at a stage's end is not among it."""
        relays = self.units.relays[stage] if self.units.is_over_stages else -1
        if relays not in self._seconds_by_relays:
            is_over_stages = self.units.is_over_stages
            counts = (relays,) * self.measurements.num_blocks if is_over_stages else self.units.relays
            per_block = block_seconds(self.measurements, counts, checkpoint=self.checkpoint)
            if not is_over_stages:
                per_block = per_block + self._reading_seconds[1:]
            self._seconds_by_relays[relays] = _accumulate(self.num_microbatches * per_block + self._update)
        return self._seconds_by_relays[relays]

    def _at_end(self, per_boundary: Sequence[float]) -> Matrix:
        """[s]: what a readout at boundary s adds; 0 where the windows over blocks have none."""
        values = np.array([0.0, *per_boundary])
        if not self.units.is_over_stages:
            values[[s for s in range(len(values)) if s not in self.units.readouts]] = 0.0
        return values

    @cached_property
    def _reading_seconds(self) -> Matrix:
        return self._at_end([readout.seconds for readout in self.measurements.readouts])

    @cached_property
    def _reading_bytes(self) -> Matrix:
        return self._at_end([readout.saved_bytes for readout in self.measurements.readouts])

    @cached_property
    def _head_bytes(self) -> Matrix:
        return self._at_end([self._lasting_bytes(readout) for readout in self.measurements.readouts])

    @cached_property
    def _weights(self) -> Matrix:
        return _accumulate([self._lasting_bytes(block) for block in self.measurements.blocks])

    def _lasting_bytes(self, part: BlockCosts | ReadoutCosts) -> float:
        """With the bucket in which gradients go to other replicas."""
        one = self.measurements
        return one.lasting_bytes(part) + self.has_replicas * part.parameter_bytes * one.gradient_multiple

    @cached_property
    def _held(self) -> Matrix:
        blocks = self.measurements.blocks
        if self.checkpoint:
            return _accumulate([0.0, *(block.output_bytes for block in blocks[:-1])])
        return _accumulate([block.saved_bytes for block in blocks])

    @cached_property
    def _entering(self) -> Matrix:
        """Bytes that a stage holds of the input of the block that it begins with."""
        shared = [0.0 if self.checkpoint else block.shared_input_bytes for block in self.measurements.blocks]
        return np.array([*shared, 0.0])

    def bytes_on(self, stage: int, starts: Places, ends: Places) -> Matrix:
        """The bytes of blocks start..end-1 on this stage."""
        passing = max(block.saved_bytes for block in self.measurements.blocks) if self.checkpoint else 0.0
        held = self._held[ends] - self._held[starts] + self._entering[starts]
        read = self._read_on(stage, self._reading_bytes, starts, ends)
        return self.weights_on(stage, starts, ends) + self.in_flight[stage] * held + np.maximum(read, passing)

    def weights_on(self, stage: int, starts: Places, ends: Places) -> Matrix:
        """Of these, what belongs to weights."""
        return self._weights[ends] - self._weights[starts] + self._read_on(stage, self._head_bytes, starts, ends)

    def _read_on(self, stage: int, at_end: Matrix, starts: Places, ends: Places) -> Matrix:
        """The sum over the readouts that these blocks end in."""
        if self.units.is_over_stages:
            return float(self._is_read(stage)) * at_end[ends]
        total = np.cumsum(at_end)
        return np.asarray(total[ends] - total[starts])


def furthest(windows: Windows) -> int:
    """How many units the windows look ahead at most."""
    return max(aims[-1][0] - t for t, aims in enumerate(windows.targets))


def block_seconds(measurements: Measurements, relays: Sequence[int], *, checkpoint: bool) -> Matrix:
    """Of each block, per micro-batch: forward, relays and backward; without reading losses."""
    again = 1.0 if checkpoint else 0.0
    forward, input_grad, weight_grad = np.array(
        [(b.forward, b.input_grad, b.weight_grad) for b in measurements.blocks]
    ).T
    passes = 1 + np.array(relays)
    return np.asarray(forward + input_grad * passes + weight_grad + again * forward * passes)


def count_relays(windows: Windows) -> tuple[int, ...]:
    """How many adjoints cross each unit beside its own backward, as `Work.is_relayed` says of units on their own."""
    going_on = np.zeros(windows.num_blocks + 1, dtype=np.int64)
    for readout in windows.readouts:
        going_on[windows.stop_of(readout) + 1] += 1
        going_on[readout] -= 1
    counts = np.cumsum(going_on)[:-1]
    for unit, aims in enumerate(windows.targets):
        # A backward of a single target of weight 1 carries that adjoint on.
        counts[unit] -= len(aims) == 1 and aims[0][1] == 1.0 and unit > windows.stop_of(aims[0][0])
    return tuple(map(int, counts))


def _accumulate(per_block: Sequence[float] | Matrix) -> Matrix:
    return np.concatenate([[0.0], np.cumsum(per_block)])


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
