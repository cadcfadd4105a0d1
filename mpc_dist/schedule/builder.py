"""A list scheduler: orders a step's work on every rank, greedily in time, under a cap on micro-batches in flight.

It runs the step with the given costs, the link's latency included, and lets every idle rank take its most urgent ready
action. What other ranks wait for comes first, weight gradients fill the gaps. The result depends only on its arguments.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mpc_dist.schedule.action import Action, Op, Schedule
from mpc_dist.schedule.communication import add_communication
from mpc_dist.schedule.costs import Costs
from mpc_dist.schedule.layout import Layout
from mpc_dist.schedule.simulator import simulate
from mpc_dist.schedule.work import Work
from mpc_dist.validation import check_whole

MANY_SEGMENTS = 128
"""Beyond this, orders for other latencies are not tried: it would take long, and the gain is small."""


def build_schedule(
    layout: Layout,
    num_microbatches: int,
    *,
    split: bool = False,
    cap: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule of a layout's step, with sends and receives.

    `split` makes each backward an input half and a weight half. `cap` bounds the micro-batches in flight on any rank;
    None takes the horizon in stages, or one more if that is faster. Without costs, a forward costs 1 per block.
    """
    check_whole("number of micro-batches:", num_microbatches, minimum=1)
    if costs is None:
        costs = Costs.uniform([len(blocks) for blocks in layout.blocks])
    work = Work(layout, num_microbatches, split)
    if cap is not None:
        check_whole("in-flight cap", cap, minimum=1)
        return _build(work, cap, costs)
    span = min(layout.span, num_microbatches)
    caps = [span] if span in (1, num_microbatches) else [span, span + 1]
    # Greedy choices are not monotone: an order made for a faster link can be the better one on a slower link.
    latencies = [costs.latency] if layout.num_segments > MANY_SEGMENTS else sorted({0.0, costs.latency})
    best: tuple[float, Schedule] | None = None
    for candidate in caps:
        for latency in latencies:
            schedule = _build(work, candidate, replace(costs, latency=latency))
            if len(caps) == len(latencies) == 1:
                return schedule
            time = simulate(schedule, layout, costs).step_time
            # More in flight must pay: by at least 1 % of the step.
            if best is None or time < best[0] * (1.0 if candidate == caps[0] else 0.99):
                best = time, schedule
    assert best is not None
    return best[1]


def _build(work: Work, cap: int, costs: Costs) -> Schedule:
    orders = _Simulation(work, _caps(work, cap), costs).run()
    programs = tuple((*_join_halves(order, work), Action(Op.UPDATE)) for order in orders)
    return add_communication(Schedule(programs, work.num_microbatches), work.layout)


def _caps(work: Work, cap: int) -> list[int]:
    """The cap of each rank. Whole backwards need no more than the stages that a rank's windows reach over (1F1B)."""
    layout = work.layout
    if work.is_split:
        return [cap] * layout.num_ranks
    furthest = [max(layout.windows.targets[s][-1][0] for s in own) for own in layout.segments]
    return [min(cap, layout.ranks[end - 1] - rank + 1) for rank, end in enumerate(furthest)]


def _join_halves(order: Sequence[Action], work: Work) -> Iterator[Action]:
    """Put halves together again that ended up side by side, unless another segment waits for the first."""
    skip = False
    for action, following in zip(order, [*order[1:], None], strict=True):
        if skip:
            skip = False
            continue
        op, segment, microbatch, _ = action
        skip = (
            op is Op.INPUT_HALF
            and following == Action(Op.WEIGHT_HALF, segment, microbatch)
            and work.carried_readout(segment) is None
        )
        yield Action(Op.BACKWARD, segment, microbatch) if skip else action


@dataclass(frozen=True)
class _Task:
    """A compute action of any micro-batch, with what does not depend on the micro-batch."""

    action: Action
    rank: int
    cost: float
    urgency: int
    followers: list[tuple[int, float]]
    """Tasks that wait for this one, with the delay at which they hear of it."""
    num_needs: int
    enters: bool
    """Whether it lets a micro-batch into its rank."""


class _Simulation:
    """One step in time; state is indexed by task and micro-batch."""

    def __init__(self, work: Work, caps: Sequence[int], costs: Costs) -> None:
        self.num_microbatches = work.num_microbatches
        self.caps = caps
        self.tasks = _tasks(work, costs)
        per_rank = [0] * work.layout.num_ranks
        for task in self.tasks:
            per_rank[task.rank] += 1
        microbatches = range(self.num_microbatches)
        self.missing = [[task.num_needs] * self.num_microbatches for task in self.tasks]
        self.unfinished = [[count for _ in microbatches] for count in per_rank]

    def run(self) -> list[list[Action]]:
        """The order of compute actions on each rank."""
        num_ranks = len(self.caps)
        orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        ready: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]  # (urgency, micro-batch, task)
        waiting: list[list[int]] = [[] for _ in range(num_ranks)]  # micro-batches that the cap keeps out
        entry = {task.rank: index for index, task in enumerate(self.tasks) if task.enters}
        is_busy, in_flight = [False] * num_ranks, [0] * num_ranks
        # (time, task, micro-batch, whether it ends then or becomes ready)
        events: list[tuple[float, int, int, bool]] = [
            (0.0, index, microbatch, False)
            for index, task in enumerate(self.tasks)
            if task.num_needs == 0
            for microbatch in range(self.num_microbatches)
        ]
        heapq.heapify(events)
        while events:
            now, touched = events[0][0], set()
            while events and events[0][0] <= now:
                _, index, microbatch, ends = heapq.heappop(events)
                task = self.tasks[index]
                touched.add(task.rank)
                if not ends:
                    if task.enters:
                        heapq.heappush(waiting[task.rank], microbatch)
                    else:
                        heapq.heappush(ready[task.rank], (task.urgency, microbatch, index))
                    continue
                is_busy[task.rank] = False
                self.unfinished[task.rank][microbatch] -= 1
                in_flight[task.rank] -= self.unfinished[task.rank][microbatch] == 0
                for follower, delay in task.followers:
                    self.missing[follower][microbatch] -= 1
                    if self.missing[follower][microbatch] == 0:
                        heapq.heappush(events, (now + delay, follower, microbatch, False))
            for rank in sorted(touched):
                if is_busy[rank]:
                    continue
                if waiting[rank] and in_flight[rank] < self.caps[rank]:
                    first = self.tasks[entry[rank]].urgency, waiting[rank][0], entry[rank]
                    if not ready[rank] or first < ready[rank][0]:
                        heapq.heappop(waiting[rank])
                        heapq.heappush(ready[rank], first)
                        in_flight[rank] += 1
                if ready[rank]:
                    _, microbatch, index = heapq.heappop(ready[rank])
                    task = self.tasks[index]
                    orders[rank].append(task.action._replace(microbatch=microbatch))
                    is_busy[rank] = True
                    heapq.heappush(events, (now + task.cost, index, microbatch, True))
        assert all(count == 0 for counts in self.unfinished for count in counts), "the scheduler left work undone"
        return orders


def _tasks(work: Work, costs: Costs) -> list[_Task]:
    layout = work.layout
    actions = [action for segment in range(layout.num_segments) for action in work.actions_of(segment)]
    index_of = {action: index for index, action in enumerate(actions)}
    needs = [set(work.needs(action)) for action in actions]
    followers: list[list[tuple[int, float]]] = [[] for _ in actions]
    for index, action in enumerate(actions):
        for need in needs[index]:
            crosses = layout.ranks[need.segment] != layout.ranks[action.segment]
            followers[index_of[need]].append((index, costs.latency if crosses else 0.0))
    first_on_rank = {own[0] for own in layout.segments}
    return [
        _Task(
            action,
            layout.ranks[action.segment],
            costs.of(action),
            _urgency(work, action),
            followers[index],
            len(needs[index]),
            action.op is Op.FORWARD and action.segment in first_on_rank,
        )
        for index, action in enumerate(actions)
    ]


def _urgency(work: Work, action: Action) -> int:
    """Smaller is sooner: adjoints that others wait for, then forwards, then what only this rank waits for."""
    if action.op is Op.RELAY:
        return 0
    if action.op in (Op.BACKWARD, Op.INPUT_HALF):
        return 0 if work.carried_readout(action.segment) is not None else 2
    return 1 if action.op is Op.FORWARD else 3
