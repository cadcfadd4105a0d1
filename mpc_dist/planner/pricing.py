"""Prices a way to train: its best partition, the schedule, what it takes in time and bytes, and what it is worth."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from mpc_dist.planner.cost import LadderCost
from mpc_dist.planner.measurements import Measurements
from mpc_dist.planner.objective import Choice, find_best
from mpc_dist.planner.partition import (
    StagePricer,
    UnitWindows,
    furthest,
    parse_partition,
    partition_blocks,
    slowest_stage,
)
from mpc_dist.planner.plan import Candidate, Shape
from mpc_dist.planner.request import Request
from mpc_dist.schedule import Costs, Layout, Schedule, build_schedule, lay_out, simulate
from mpc_dist.schedule.action import Op
from mpc_dist.schedule.simulator import Price
from mpc_dist.validation import check_whole
from mpc_dist.windows import Windows

CosineOf = Callable[[Windows], float]
SIMULATED_ACTIONS = 20_000
"""Of a horizon's schedule with more compute actions, the step time is estimated."""


class Setting(NamedTuple):
    """A way to train, before it is priced."""

    shape: Shape
    num_stages: int
    microbatches: int
    split: bool
    checkpoint: bool


class Planner:
    """Prices candidates for one model and one request."""

    def __init__(self, measurements: Mapping[int, Measurements], cosine: CosineOf, request: Request) -> None:
        if not measurements:
            raise ValueError("there is nothing to plan from: the profile is empty")
        self._measurements = dict(measurements)
        self._cosine = cosine
        self._request = request
        self._objective = request.build_objective()
        self._cost = request.build_cost()
        self._num_blocks = next(iter(measurements.values())).num_blocks
        self._qualities: dict[tuple[Shape, tuple[int, ...]], float] = {}
        self._units: dict[tuple[Shape, int], UnitWindows] = {}
        self.estimated: list[int] = []
        """Horizons of which `step_seconds` was an estimate: their schedules are too long to be simulated."""
        self._check_memory()

    @property
    def measurements(self) -> Mapping[int, Measurements]:
        """What was measured, by number of micro-batches."""
        return self._measurements

    @property
    def request(self) -> Request:
        """What is asked for."""
        return self._request

    @property
    def num_blocks(self) -> int:
        """How many blocks the model has (T)."""
        return self._num_blocks

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that were measured."""
        return tuple(self._measurements)

    def costs(self, layout: Layout, microbatches: int, *, checkpoint: bool = False) -> Costs:
        """What the simulator prices this layout with."""
        return self._measurements[microbatches].segment_costs(
            layout, checkpoint=checkpoint, latency=self._request.latency, bandwidth=self._request.bandwidth
        )

    def costs_of(self, candidate: Candidate) -> dict[str, Any]:
        """What a candidate's schedule is built for, as plain values."""
        layout = lay_out(candidate.shape.over_blocks(candidate.partition), candidate.partition)
        costs = self.costs(layout, candidate.microbatches, checkpoint=candidate.checkpoint)
        names = ("forward", "input_grad", "weight_grad", "latency", "bandwidth", "message_bytes", "update")
        values = {name: getattr(costs, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def step_seconds(self, horizon: int) -> float:
        """Predicted time of a step with the paper's windows, on all GPUs, whatever memory it takes."""
        num_stages, microbatches = self._stage_counts[-1], max(self._measurements)
        shape = Shape("sliding", horizon, "blocks")
        setting = Setting(shape, num_stages, microbatches, num_stages > 1, False)
        pricer = self.pricer(setting)
        partition = self.given or partition_blocks(self._num_blocks, num_stages, pricer)
        assert partition is not None
        if self.num_actions(setting) > SIMULATED_ACTIONS:
            # Ranks that relay that much are always busy: the slowest one's work is the step.
            self.estimated.append(horizon)
            return slowest_stage(partition, pricer)
        layout = lay_out(shape.over_blocks(partition), partition)
        costs = self.costs(layout, microbatches)
        schedule = build_schedule(layout, microbatches, split=setting.split, costs=costs)
        return simulate(schedule, layout, costs).step_time

    def _check_memory(self) -> None:
        """The largest block alone must fit."""
        least = min(self._measurements.values(), key=lambda one: one.samples)
        needs = [least.weight_bytes([t], []) for t in range(self._num_blocks)]
        if max(needs) > self._request.gpu_memory:
            block = needs.index(max(needs))
            raise ValueError(
                f"block {block}'s weights, gradients and optimizer state need {max(needs):,.0f} bytes, a GPU has "
                f"{self._request.gpu_memory:,.0f}; no number of GPUs helps: use larger ones, or smaller blocks"
            )

    def settings(self, horizon: int) -> list[Setting]:
        """Everything worth a look; h* is among it."""
        return [
            Setting(shape, num_stages, m, split, checkpoint)
            for num_stages in self._stage_counts
            for m in self._measurements
            for shape, split, checkpoint in self._shapes(num_stages, horizon)
        ]

    @property
    def most_stages(self) -> int:
        """The largest number of stages that is looked at."""
        return self._stage_counts[-1]

    @cached_property
    def _stage_counts(self) -> Sequence[int]:
        request = self._request
        if request.layout is not None:
            count = len(parse_partition(request.layout, self._num_blocks))
            return range(count, count + 1)
        if request.num_gpus is not None:
            check_whole("number of GPUs:", request.num_gpus, minimum=1, maximum=self._num_blocks)
            return range(request.num_gpus, request.num_gpus + 1)
        most = min(request.max_gpus, self._num_blocks)
        # Every number of a few GPUs; of many, those that one would buy.
        steps = ((8, 1), (32, 4), (256, 16), (most, 128))
        return [k for k in range(1, most + 1) if k == most or any(k <= end and k % step == 0 for end, step in steps)]

    def _shapes(self, num_stages: int, horizon: int) -> Iterator[tuple[Shape, bool, bool]]:
        yield Shape("backprop"), False, False
        yield Shape("backprop"), False, True
        if num_stages > 1:
            yield Shape("backprop"), True, False
        is_split = num_stages > 1
        if horizon < self._num_blocks:
            yield Shape("sliding", horizon, "blocks"), is_split, False
        if horizon > 1:
            yield Shape("sliding", 1, "blocks"), is_split, False
        sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size < num_stages]
        for size in sizes:
            yield Shape("sliding", size, "stages"), is_split, False
            if size > 1:
                yield Shape("cumulative", size, "stages"), is_split, False
                yield Shape("tumbling", size, "stages"), is_split, False
        for size in (2, 4, 8, 16):
            if size < self._num_blocks:
                yield Shape("tumbling", size, "blocks"), is_split, False

    def units_of(self, setting: Setting) -> UnitWindows:
        """The windows over stages or over blocks, whichever the shape counts in."""
        is_over_stages = setting.shape.unit == "stages"
        key = setting.shape, setting.num_stages if is_over_stages else self._num_blocks
        if key not in self._units:
            self._units[key] = UnitWindows(setting.shape.over_units(key[1]), is_over_stages)
        return self._units[key]

    def pricer(self, setting: Setting) -> StagePricer:
        """What stages cost with these windows, as if memory did not matter."""
        units = self.units_of(setting)
        return StagePricer(
            self._measurements[setting.microbatches],
            units,
            setting.microbatches,
            self._in_flight(setting, units),
            checkpoint=setting.checkpoint,
            has_replicas=self._request.num_replicas > 1,
        )

    def _in_flight(self, setting: Setting, units: UnitWindows) -> tuple[int, ...]:
        """How many micro-batches the builder will let each rank hold: no more stages than its windows reach over."""
        num_stages = setting.num_stages
        reach = units.reach
        if not units.is_over_stages:
            reach = -(-reach * num_stages // self._num_blocks) + 1
        most = min(setting.microbatches, reach)
        return tuple(most if setting.split else min(most, num_stages - stage) for stage in range(num_stages))

    def num_actions(self, setting: Setting) -> int:
        """How many compute actions a step has, or a little more."""
        relays = self.units_of(setting).relays
        return setting.microbatches * ((3 if setting.split else 2) * len(relays) + sum(relays))

    def price(self, setting: Setting) -> Candidate | None:
        """The candidate with its best partition; None if it does not fit."""
        for partition, cap in self.attempts(setting):
            candidate = self._price_partition(setting, partition, cap)
            if max(candidate.bytes_per_rank) <= self._request.gpu_memory:
                return candidate
        return None

    def attempts(self, setting: Setting) -> Iterator[tuple[tuple[int, ...], int | None]]:
        """Partitions and caps to try, fastest first: as if memory did not matter; within the memory; one in flight."""
        pricer, given, tried = self.pricer(setting), self.given, None
        alone = (1,) * setting.num_stages
        for cap, limit, in_flight in (
            (None, math.inf, pricer.in_flight),
            (None, self._request.gpu_memory, pricer.in_flight),
            (1, self._request.gpu_memory, alone),
        ):
            if cap is not None and setting.microbatches == 1:
                return
            limited = replace(pricer, memory_limit=limit, in_flight=in_flight)
            partition = given or partition_blocks(self._num_blocks, setting.num_stages, limited)
            if partition is not None and (partition, cap) != tried:
                tried = partition, cap
                yield tried

    @property
    def given(self) -> tuple[int, ...] | None:
        """The partition by hand, if there is one."""
        layout = self._request.layout
        return None if layout is None else parse_partition(layout, self._num_blocks)

    def quality_of(self, shape: Shape, partition: tuple[int, ...], windows: Windows | None) -> float:
        """r^ = cos^2 of these windows' angle to back-propagation; `windows` over blocks, where they are known."""
        # Windows over blocks do not depend on the partition.
        key = shape, partition if shape.unit == "stages" and shape.windows != "backprop" else ()
        if key not in self._qualities:
            cosine = self._cosine(shape.over_blocks(partition) if windows is None else windows)
            self._qualities[key] = max(0.0, min(1.0, cosine)) ** 2
        return self._qualities[key]

    def _price_partition(self, setting: Setting, partition: tuple[int, ...], cap: int | None) -> Candidate:
        shape, _, microbatches, split, checkpoint = setting
        windows = shape.over_blocks(partition)
        layout = lay_out(windows, partition)
        costs = self.costs(layout, microbatches, checkpoint=checkpoint)
        schedule = build_schedule(layout, microbatches, split=split, cap=cap, costs=costs)
        price = simulate(schedule, layout, costs)
        sizes = predict_bytes(
            self._measurements[microbatches],
            layout,
            schedule,
            price,
            has_replicas=self._request.num_replicas > 1,
        )
        choice = Choice(
            horizon=furthest(windows),
            quality=self.quality_of(shape, partition, windows),
            memory=max(sizes),
            cost=self._realised_cost(sizes),
            num_gpus=len(partition),
            step_seconds=price.step_time,
        )
        return Candidate(
            shape,
            partition,
            microbatches,
            split,
            checkpoint,
            cap,
            max(price.in_flight),
            int(choice.horizon),
            sizes,
            price.step_time,
            max(price.bubble),
            choice.quality,
            choice.cost,
            self._objective(choice),
        )

    def _realised_cost(self, sizes: tuple[float, ...]) -> float:
        """GPUs come whole on the ladder; another cost sees the bytes of all ranks."""
        if isinstance(self._cost, LadderCost):
            return self._cost.price * len(sizes)
        return self._cost(sum(sizes))

    def choice_of(self, candidate: Candidate, quality: float) -> Choice:
        """The candidate as the objective sees it with that quality."""
        return Choice(
            candidate.horizon_blocks,
            quality,
            max(candidate.bytes_per_rank),
            candidate.cost,
            candidate.num_gpus,
            candidate.step_seconds,
        )

    def value_of(self, candidate: Candidate, quality: float) -> float:
        """The objective with that quality."""
        return self._objective(self.choice_of(candidate, quality))

    def rank(self, candidates: list[Candidate]) -> list[Candidate]:
        """Best first; of equal values, the faster one with fewer GPUs. Windows that drift come last, whatever the angle
        promises: only a trial can show that they learn."""
        if not candidates:
            raise ValueError(
                f"nothing fits {self._request.max_gpus} GPUs of {self._request.gpu_memory:,.0f} bytes; "
                "give more or larger ones, a smaller batch, or more micro-batches"
            )
        find_best([self.choice_of(one, one.quality) for one in candidates], self._objective)
        return sorted(candidates, key=lambda one: (one.shape.drifts, one.value, one.step_seconds, one.num_gpus))


def bucket_bytes(measurements: Measurements, parameter_bytes: Sequence[float]) -> float:
    """What a rank with replicas holds to average its gradients: every bucket keeps its buffer."""
    return sum(parameter_bytes) * measurements.gradient_multiple


def predict_bytes(
    measurements: Measurements, layout: Layout, schedule: Schedule, price: Price, *, has_replicas: bool = False
) -> tuple[float, ...]:
    """What each rank holds at most: weights, gradients, optimizer state, activations, messages, replicas' buckets."""
    sizes = []
    for rank in range(layout.num_ranks):
        blocks = layout.stage_blocks(rank)
        read = [layout.blocks[s].stop for s in layout.segments[rank] if s + 1 in layout.windows.readouts]
        # An activation enters from below, an adjoint from above.
        boundary_of = {Op.RECEIVE_ACTIVATION: blocks.start - 1, Op.RECEIVE_ADJOINT: blocks.stop - 1}
        received = {action.op for action in schedule.programs[rank]} & set(boundary_of)
        messages = sum(measurements.blocks[boundary_of[op]].message_bytes for op in received)
        size = measurements.weight_bytes(blocks, read) + price.peak_bytes[rank] + measurements.messages_held * messages
        trained = [measurements.blocks[t].parameter_bytes for t in blocks]
        trained += [measurements.readouts[s - 1].parameter_bytes for s in read]
        sizes.append(size + (bucket_bytes(measurements, trained) if has_replicas else 0.0))
    return tuple(sizes)
