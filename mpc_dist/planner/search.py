"""Prices every way to train that is worth trying, and takes the best: the realisation of Algorithm 1's answer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpc_dist.planner.cost import CostFunction, LadderCost, build_cost
from mpc_dist.planner.measurements import Measurements
from mpc_dist.planner.objective import Choice, Objective, build_objective, find_best
from mpc_dist.planner.partition import StagePricer, parse_partition, partition_blocks
from mpc_dist.planner.plan import Candidate, Plan, Shape
from mpc_dist.planner.select import Selection
from mpc_dist.schedule import Costs, Layout, Schedule, build_schedule, lay_out, simulate
from mpc_dist.schedule.action import Op
from mpc_dist.schedule.simulator import Price
from mpc_dist.validation import check_real, check_whole
from mpc_dist.windows import Windows

CosineOf = Callable[[Windows], float]
MESSAGES_HELD = 2
"""Receives that a rank posts ahead on each channel."""


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    gpu_memory: float
    """M0 in bytes."""
    max_gpus: int = 8
    objective: str = "time"
    """O1, O2, memory, time, money, or a dotted path."""
    cost: str = "ladder"
    """ladder, linear, or a dotted path."""
    epsilon: float = 0.1
    """O1's tolerance."""
    weight: float = 0.1
    """O2's lambda."""
    price: float = 1.0
    """Of one GPU: per unit of the cost, and per second for money."""
    latency: float = 1e-4
    """Of a message between ranks, in seconds."""
    bandwidth: float = 1e9
    """Of a link, in bytes per second."""
    layout: str | None = None
    """A partition by hand, e.g. 4|4|6|2."""
    num_gpus: int | None = None
    """Exactly so many; None: any number up to the limit."""

    def __post_init__(self) -> None:
        check_real("GPU memory", self.gpu_memory, minimum=1)
        check_whole("number of GPUs:", self.max_gpus, minimum=1)
        self.build_objective()
        self.build_cost()

    def build_objective(self) -> Objective:
        """What is minimised."""
        return build_objective(
            self.objective,
            epsilon=self.epsilon,
            weight=self.weight,
            memory_limit=self.gpu_memory,
            price=self.price,
        )

    def build_cost(self) -> CostFunction:
        """What memory costs."""
        return build_cost(self.cost, unit_bytes=self.gpu_memory, price=self.price)


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
        self._check_memory()

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
        num_stages, microbatches = self._stage_counts()[-1], max(self._measurements)
        windows = Shape("sliding", horizon, "blocks")
        pricer = StagePricer(
            self._measurements[microbatches],
            windows.over_units(self._num_blocks),
            False,
            microbatches,
            (1,) * num_stages,
        )
        partition = self._given() or partition_blocks(self._num_blocks, num_stages, pricer)
        assert partition is not None
        layout = lay_out(windows.over_blocks(partition), partition)
        costs = self.costs(layout, microbatches)
        schedule = build_schedule(layout, microbatches, split=num_stages > 1, costs=costs)
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

    def settings(self, horizon: int) -> list[tuple[Shape, int, int, bool, bool]]:
        """(shape, stages, micro-batches, split, checkpoint) of everything to price; h* is among them."""
        return [
            (shape, num_stages, m, split, checkpoint)
            for num_stages in self._stage_counts()
            for m in self._measurements
            for shape, split, checkpoint in self._shapes(num_stages, horizon)
        ]

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
        return [k for k in range(1, most + 1) if k <= 8 or (k % 4 == 0 and k <= 32) or k % 16 == 0 or k == most]

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

    def price(
        self, shape: Shape, num_stages: int, microbatches: int, split: bool, checkpoint: bool
    ) -> Candidate | None:
        """The candidate with its best partition; None if it does not fit."""
        measurements = self._measurements[microbatches]
        windows = shape.over_units(num_stages if shape.unit == "stages" else self._num_blocks)
        in_flight = tuple(min(microbatches, num_stages - stage) for stage in range(num_stages))
        pricer = StagePricer(
            measurements,
            windows,
            shape.unit == "stages",
            microbatches,
            in_flight,
            checkpoint=checkpoint,
        )
        # First as if memory did not matter, to see how many micro-batches each rank holds; then within the memory.
        for cap in (None, 1):
            for limit in (math.inf, self._request.gpu_memory):
                limited = replace(pricer, memory_limit=limit)
                partition = self._given() or partition_blocks(self._num_blocks, num_stages, limited)
                if partition is None:
                    break
                candidate, price = self._price_partition(
                    shape, partition, measurements, microbatches, split, checkpoint, cap
                )
                if max(candidate.bytes_per_rank) <= self._request.gpu_memory:
                    return candidate
                pricer = replace(pricer, in_flight=price.in_flight)
            if microbatches == 1:
                break
        return None

    def _given(self) -> tuple[int, ...] | None:
        layout = self._request.layout
        return None if layout is None else parse_partition(layout, self._num_blocks)

    def _price_partition(
        self,
        shape: Shape,
        partition: tuple[int, ...],
        measurements: Measurements,
        microbatches: int,
        split: bool,
        checkpoint: bool,
        cap: int | None,
    ) -> tuple[Candidate, Price]:
        windows = shape.over_blocks(partition)
        layout = lay_out(windows, partition)
        costs = self.costs(layout, microbatches, checkpoint=checkpoint)
        schedule = build_schedule(layout, microbatches, split=split, cap=cap, costs=costs)
        price = simulate(schedule, layout, costs)
        sizes = predict_bytes(measurements, layout, schedule, price)
        quality = max(0.0, min(1.0, self._cosine(windows))) ** 2
        choice = Choice(
            horizon=max(aims[-1][0] - t for t, aims in enumerate(windows.targets)),
            quality=quality,
            memory=max(sizes),
            cost=self._realised_cost(sizes),
            num_gpus=len(partition),
            step_seconds=price.step_time,
        )
        candidate = Candidate(
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
            quality,
            choice.cost,
            self._objective(choice),
        )
        return candidate, price

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


def predict_bytes(measurements: Measurements, layout: Layout, schedule: Schedule, price: Price) -> tuple[float, ...]:
    """What each rank holds at most: weights, gradients, optimizer state, activations, messages posted ahead."""
    sizes = []
    for rank in range(layout.num_ranks):
        blocks = layout.stage_blocks(rank)
        read = [layout.blocks[s].stop for s in layout.segments[rank] if s + 1 in layout.windows.readouts]
        # An activation enters from below, an adjoint from above.
        boundary_of = {Op.RECEIVE_ACTIVATION: blocks.start - 1, Op.RECEIVE_ADJOINT: blocks.stop - 1}
        received = {action.op for action in schedule.programs[rank]} & set(boundary_of)
        messages = sum(measurements.blocks[boundary_of[op]].output_bytes for op in received)
        sizes.append(measurements.weight_bytes(blocks, read) + price.peak_bytes[rank] + MESSAGES_HELD * messages)
    return tuple(sizes)


def make_plan(
    planner: Planner,
    selection: Selection,
    request: Request,
    *,
    fingerprint: dict[str, Any],
    notes: tuple[str, ...] = (),
    advance: Callable[[], None] = lambda: None,
) -> Plan:
    """Price every candidate, and take the best; `advance` is called after each, for a progress bar."""
    priced = []
    for setting in planner.settings(selection.horizon):
        candidate = planner.price(*setting)
        if candidate is not None:
            priced.append(candidate)
        advance()
    ranked = planner.rank(priced)
    ladder = LadderCost(request.gpu_memory).count(selection.choice.memory)
    realised = _realise(planner, selection, request, ladder)
    return Plan(
        chosen=ranked[0],
        objective=request.objective,
        gpu_memory=request.gpu_memory,
        horizon=selection.horizon,
        ladder_gpus=ladder,
        realised=realised,
        why=_explain(selection, request, ladder, realised),
        notes=(*notes, *selection.warnings, *_note_passed_over(ranked)),
        costs=planner.costs_of(ranked[0]),
        fingerprint=fingerprint,
        candidates=tuple(ranked),
    )


def _note_passed_over(ranked: list[Candidate]) -> Iterator[str]:
    best = min(ranked, key=lambda one: one.value)
    if best.shape.drifts and best.value < ranked[0].value:
        yield (
            f"{best.shape} has a better value by its angle ({best.value:.4g} against {ranked[0].value:.4g}), but no "
            "trial has shown that sliding windows of more than one unit learn here; --trial would"
        )


def _realise(planner: Planner, selection: Selection, request: Request, ladder: int) -> Candidate | None:
    """h* on the fewest GPUs, from the ladder's count on, on which every rank keeps within its memory."""
    num_blocks = len(selection.choices)
    whole = selection.horizon == num_blocks
    shape = Shape("backprop") if whole else Shape("sliding", selection.horizon, "blocks")
    for num_gpus in range(ladder, min(request.max_gpus, num_blocks) + 1):
        for microbatches in planner.microbatches:
            found = planner.price(shape, num_gpus, microbatches, num_gpus > 1, False)
            if found is not None:
                return found
    return None


def _explain(selection: Selection, request: Request, ladder: int, realised: Candidate | None) -> str:
    if realised is None:
        return (
            f"the ladder asks for {ladder} GPUs; no partition of h* = {selection.horizon} keeps every rank within its "
            f"memory on up to {request.max_gpus} GPUs"
        )
    if realised.num_gpus == ladder:
        return f"the ladder's {ladder} GPUs hold h* = {selection.horizon} rank by rank"
    fullest = max(range(realised.num_gpus), key=realised.bytes_per_rank.__getitem__)
    return (
        f"the ladder divides the whole memory evenly into {ladder} GPUs, but blocks do not cut evenly, windows that "
        f"cross ranks hold activations on several, and ranks hold messages: the fewest that keep within it are "
        f"{realised.num_gpus} (fullest: rank {fullest} with {realised.bytes_per_rank[fullest]:,.0f} bytes)"
    )
