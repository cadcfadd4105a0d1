"""What a way to train can be worth at best, found without a schedule: most need never be simulated.

Two facts bound a step, whatever the order of actions and the limit on micro-batches in flight:

work   a rank does all its work between two updates
path   so it does between a micro-batch's forward and its backward, and the adjoint that the backward waits for comes
       from the stages above: rank k of a window's ranks s..r-1 starts when one micro-batch has come up to it, and its
       last adjoint must go down again:  step >= sum over j in s..k-1 of (f_j + b_j) + M (f_k + b_k) + update

Objectives only improve with time, quality, bytes, cost and horizon, so an optimistic choice bounds them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mpc_dist.planner.cost import LadderCost, LinearCost, UserFunction
from mpc_dist.planner.measurements import Measurements
from mpc_dist.planner.objective import Choice, LeastCost, Objective, Trade
from mpc_dist.planner.partition import Matrix, StagePricer, block_seconds, furthest, slowest_stage
from mpc_dist.planner.plan import Shape
from mpc_dist.planner.pricing import Planner, Setting, bucket_bytes
from mpc_dist.windows import Windows

CAUTION = 1 - 1e-9
"""Sums in another order may differ in their last digits."""


@dataclass(frozen=True, order=True)
class Bound:
    """What no candidate of a setting is better than, in the order in which candidates are ranked."""

    value: float
    step_seconds: float
    num_gpus: int
    order: int
    """Of equals, the setting that comes first is taken."""


class Bounds:
    """Bounds of a planner's settings."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._request = planner.request
        self._objective = self._request.build_objective()
        self._cost = self._request.build_cost()
        self._base = lru_cache(maxsize=None)(self._find_base)
        self._of_blocks = lru_cache(maxsize=None)(self._find_work)
        sees_cost = isinstance(self._objective, (LeastCost, Trade))
        # Of a user's function nothing is known.
        self.is_known = not _is_of_user(self._objective) and not (sees_cost and _is_of_user(self._cost))

    def before_partition(self, setting: Setting, order: int) -> Bound:
        """Without a partition; infinite if the setting fits on no partition."""
        if not self.is_known:
            return Bound(-math.inf, 0.0, setting.num_stages, order)
        pricer = self._planner.pricer(setting)
        if not self.may_fit(setting):
            return Bound(math.inf, math.inf, setting.num_stages, order)
        is_over_blocks = setting.shape.unit == "blocks" or setting.shape.windows == "backprop"
        one_by_one = (1,) * self._planner.num_blocks
        quality = self._planner.quality_of(setting.shape, one_by_one, None) if is_over_blocks else 1.0
        horizon = self._planner.num_blocks
        if setting.shape.unit == "blocks":
            horizon = pricer.units.reach
        return self._bound(setting, order, self._least_seconds(setting, pricer), quality, horizon)

    def may_fit(self, setting: Setting) -> bool:
        """Whether all ranks together have the memory."""
        room = setting.num_stages * self._request.gpu_memory / CAUTION
        return self._least_bytes(setting, self._planner.pricer(setting)) <= room

    def with_partition(self, setting: Setting, before: Bound, is_worth: Callable[[Bound], bool]) -> Bound:
        """With the partitions that will be tried: the best of those that may fit, up to the first that surely does.

        Nothing more is looked at once a bound is worth nothing.
        """
        if not self.is_known:
            return before
        pricer, memory = self._planner.pricer(setting), self._request.gpu_memory
        found = []
        for partition, cap in self._planner.attempts(setting):
            if self._fullest(setting, pricer, partition, 0) > memory / CAUTION:
                continue
            found.append(self._of_partition(setting, before, partition, pricer, is_worth))
            if self._fullest(setting, pricer, partition, self._cap(setting, pricer, cap)) <= CAUTION * memory:
                break
        return min(found, default=Bound(math.inf, math.inf, setting.num_stages, before.order))

    def _of_partition(
        self,
        setting: Setting,
        before: Bound,
        partition: tuple[int, ...],
        pricer: StagePricer,
        is_worth: Callable[[Bound], bool],
    ) -> Bound:
        seconds = max(before.step_seconds, CAUTION * slowest_stage(partition, pricer))
        bound = self._bound(setting, before.order, seconds, 1.0, self._planner.num_blocks)
        if not is_worth(bound):
            return bound
        windows = setting.shape.over_blocks(partition)
        quality, horizon = self._planner.quality_of(setting.shape, partition, windows), furthest(windows)
        bound = self._bound(setting, before.order, seconds, quality, horizon)
        if not is_worth(bound):
            return bound
        seconds = max(seconds, CAUTION * self._path_seconds(setting, partition, windows))
        return self._bound(setting, before.order, seconds, quality, horizon)

    def _bound(self, setting: Setting, order: int, seconds: float, quality: float, horizon: int) -> Bound:
        num_stages = setting.num_stages
        choice = Choice(horizon, quality, 0.0, self._least_cost(setting), num_stages, seconds)
        return Bound(self._objective(choice), seconds, num_stages, order)

    def _least_cost(self, setting: Setting) -> float:
        if isinstance(self._cost, LadderCost):
            return self._cost.price * setting.num_stages
        if isinstance(self._cost, LinearCost):
            return CAUTION * self._cost(self._least_bytes(setting, self._planner.pricer(setting)))
        return 0.0

    def _least_bytes(self, setting: Setting, pricer: StagePricer) -> float:
        """Of all ranks: weights, the last readout, and the blocks of the widest window for one micro-batch."""
        measurements, num_blocks = pricer.measurements, self._planner.num_blocks
        base = self._base(setting.microbatches, setting.checkpoint)
        if setting.shape.windows == "backprop":
            return base.weights + float(base.held[-1])
        if setting.shape.unit == "stages":
            return base.weights
        readouts = pricer.units.windows.readouts
        heads = measurements.weight_bytes([], [s for s in readouts if s != num_blocks])
        widest = max(base.held[s] - base.held[pricer.units.windows.stop_of(s)] for s in readouts)
        return base.weights + heads + float(widest)

    def _least_seconds(self, setting: Setting, pricer: StagePricer) -> float:
        """Per step, of the slowest rank, for any partition."""
        base = self._base(setting.microbatches, setting.checkpoint)
        num_blocks, num_stages, microbatches = self._planner.num_blocks, setting.num_stages, setting.microbatches
        if setting.shape.unit == "blocks":
            total, largest = self._of_blocks(setting.shape, microbatches, setting.checkpoint)
            return CAUTION * max(total / num_stages, largest)
        # Stage k with n_k relays takes at least (1 + share n_k) times what its blocks take without relays, and reads.
        slower = 1 / (1 + base.relay_share * np.array(pricer.units.relays))
        is_read = np.isin(np.arange(1, num_stages + 1), pricer.units.windows.readouts)
        reading = microbatches * base.least_reading
        work = (float(base.step[1:].sum()) + reading * float((is_read * slower).sum())) / float(slower.sum())
        fewest = -(-num_blocks // num_stages)  # some stage has as many blocks
        least = max(work, float(base.step.sum()) / num_stages, float(base.step.max()), float(base.ascending[fewest]))
        if setting.shape.windows == "backprop":
            least = max(least, self._whole_path(setting, base))
        return CAUTION * least

    def _find_work(self, shape: Shape, microbatches: int, checkpoint: bool) -> tuple[float, float]:
        """Seconds per step of all blocks with windows over blocks, and of the largest."""
        measurements = self._planner.measurements[microbatches]
        units = self._planner.units_of(Setting(shape, 1, microbatches, False, checkpoint))
        seconds = block_seconds(measurements, units.relays, checkpoint=checkpoint)
        seconds[[s - 1 for s in units.readouts]] += [measurements.readouts[s - 1].seconds for s in units.readouts]
        seconds = microbatches * seconds + self._base(microbatches, checkpoint).update
        return float(seconds.sum()), float(seconds.max())

    def _whole_path(self, setting: Setting, base: "_Base") -> float:
        """Of back-propagation: all stages are one window.

        With P_k the time of the stages below k and t_k its own, P_k + M t_k <= step for every k and sum t_k = S give
        step >= S / (1 - (1 - 1/M)^K).
        """
        microbatches, num_stages = setting.microbatches, setting.num_stages
        on_path = base.forward + base.input_grad + (0.0 if setting.split else base.weight_grad)
        chain = float(on_path.sum()) + self._planner.measurements[microbatches].readouts[-1].seconds
        update = float(base.update.sum()) / num_stages
        links = 2 * (num_stages - 1) * (self._request.latency + base.least_message / self._request.bandwidth)
        spread = float(on_path.sum()) / (1 - (1 - 1 / microbatches) ** num_stages)
        return max(spread, chain + links + (microbatches - 1) * float(on_path[-1])) + update

    def _path_seconds(self, setting: Setting, partition: tuple[int, ...], windows: Windows) -> float:
        """The longest way of a window over the ranks, up and down again."""
        base, microbatches = self._base(setting.microbatches, setting.checkpoint), setting.microbatches
        ends = np.cumsum(partition)
        rank_of = np.repeat(np.arange(len(partition)), partition)
        # Halves of weights wait, and so do weights beside relays; only whole backwards of one target carry them along.
        carries = setting.shape.windows == "backprop" and not setting.split
        on_path = base.forward + base.input_grad + (base.weight_grad if carries else 0.0)
        read = np.array(windows.readouts) - 1
        on_path[read] += np.array([self._planner.measurements[microbatches].readouts[s].seconds for s in read])
        total = np.concatenate([[0.0], np.cumsum(on_path)])
        links = 2 * (self._request.latency + base.messages[ends - 1] / self._request.bandwidth)
        longest = 0.0
        for readout in windows.readouts:
            stop = windows.stop_of(readout)
            ranks = np.arange(rank_of[stop], rank_of[readout - 1] + 1)
            tops = total[np.minimum(ends[ranks], readout)]
            starts = np.concatenate([[total[stop]], tops[:-1]])
            under_way = np.concatenate([[0.0], np.cumsum(links[ranks[:-1]])])
            longest = max(longest, float((starts - total[stop] + under_way + microbatches * (tops - starts)).max()))
        update = np.diff(np.concatenate([[0.0], np.cumsum(base.update)])[np.concatenate([[0], ends])])
        return longest + float(update.max())

    def _cap(self, setting: Setting, pricer: StagePricer, cap: int | None) -> int:
        """The most micro-batches that the builder lets into flight."""
        if cap is not None or not pricer.units.is_over_stages:
            return cap or setting.microbatches
        return min(setting.microbatches, pricer.units.reach + 1)

    def _fullest(self, setting: Setting, pricer: StagePricer, partition: tuple[int, ...], in_flight: int) -> float:
        """No rank holds more with so many micro-batches in flight; with none, some rank holds at least this."""
        ends = np.cumsum([0, *partition])
        messages = np.zeros(len(partition))
        if in_flight:
            inner = self._base(setting.microbatches, setting.checkpoint).messages[ends[1:-1] - 1]
            number = self._planner.measurements[setting.microbatches].messages_held
            messages = number * (np.concatenate([[0.0], inner]) + np.concatenate([inner, [0.0]]))
        # For bytes, stages differ only by whether a loss is read.
        held = replace(pricer, in_flight=(in_flight,) * len(partition))
        is_read = np.array([stage + 1 in pricer.units.readouts for stage in range(len(partition))])
        sizes = messages
        for stages in (np.flatnonzero(is_read), np.flatnonzero(~is_read)):
            if len(stages):
                found = held.weights_on if not in_flight else held.bytes_on
                sizes[stages] += found(int(stages[0]), ends[stages], ends[stages + 1])
        return float(sizes.max())

    def _find_base(self, microbatches: int, checkpoint: bool) -> "_Base":
        return _Base.of(
            self._planner.measurements[microbatches],
            microbatches,
            checkpoint=checkpoint,
            has_replicas=self._request.num_replicas > 1,
        )


def _is_of_user(function: Objective | object) -> bool:
    return isinstance(function, UserFunction)


@dataclass(frozen=True)
class _Base:
    """What bounds need of the blocks."""

    forward: Matrix
    """Of each block, per micro-batch; so are the others unless it is said."""
    input_grad: Matrix
    """With what is computed again."""
    weight_grad: Matrix
    update: Matrix
    """Per step."""
    step: Matrix
    """All of a block's work per step, without relays."""
    ascending: Matrix
    """[n]: the least that n blocks take per step."""
    relay_share: float
    """The least share of a block's work that a relay takes once more; the first block's has none."""
    held: Matrix
    """Bytes of all blocks before each block."""
    messages: Matrix
    least_message: float
    least_reading: float
    weights: float
    """Bytes of all weights, gradients and state, with the last readout's."""

    @classmethod
    def of(cls, one: Measurements, microbatches: int, *, checkpoint: bool, has_replicas: bool) -> "_Base":
        blocks = one.blocks
        forward = np.array([b.forward for b in blocks])
        input_grad = np.array([b.input_grad for b in blocks]) + (forward if checkpoint else 0.0)
        weight_grad = np.array([b.weight_grad for b in blocks])
        update = np.array([one.update_seconds([t]) for t in range(len(blocks))])
        step = microbatches * (forward + input_grad + weight_grad) + update
        shares = [microbatches * i / s for i, s in zip(input_grad[1:], step[1:], strict=True) if s > 0]
        sizes = [b.message_bytes for b in blocks]
        held = [0.0, *(b.output_bytes for b in blocks[:-1])] if checkpoint else [b.saved_bytes for b in blocks]
        weights = one.weight_bytes(range(len(blocks)), [len(blocks)])
        if has_replicas:
            weights += bucket_bytes(one, [b.parameter_bytes for b in blocks])
        return cls(
            forward,
            input_grad,
            weight_grad,
            update,
            step,
            np.concatenate([[0.0], np.cumsum(np.sort(step))]),
            min(shares, default=0.0),
            np.concatenate([[0.0], np.cumsum(held)]),
            np.array(sizes),
            min(sizes),
            min(readout.seconds for readout in one.readouts),
            weights,
        )
