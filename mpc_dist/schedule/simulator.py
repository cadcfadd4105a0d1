"""Prices a schedule: step time in steady state, bubble, micro-batches in flight and bytes per rank, messages.

Ranks run their programs one action after another, step after step with no barrier; sends take no time of their rank,
receives wait for their message. This is what the executor does.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from mpc_dist.schedule.action import COMPUTE, SENDS, Action, Op, Schedule
from mpc_dist.schedule.communication import receiver_of, sender_of
from mpc_dist.schedule.costs import Costs
from mpc_dist.schedule.layout import Layout


class Interval(NamedTuple):
    """An action in time, on one rank."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Price:
    """What a schedule costs in steady state."""

    step_time: float
    """Time from one update to the next, of the slowest rank."""
    bubble: tuple[float, ...]
    """Share of the step in which each rank neither computes nor updates."""
    in_flight: tuple[int, ...]
    """Most micro-batches that each rank holds activations of at once."""
    peak_bytes: tuple[float, ...]
    """Most bytes that each rank holds for backward at once."""
    num_messages: int
    """Messages per step, over all ranks."""
    timeline: tuple[tuple[Interval, ...], ...]
    """`timeline[rank]`: compute and updates of the last simulated step."""


def simulate(schedule: Schedule, layout: Layout, costs: Costs, *, num_steps: int = 6) -> Price:
    """Run `num_steps` steps without a barrier and price the later half of them."""
    machine = _Machine(schedule, layout, costs)
    updates, timeline = machine.run(num_steps)
    half = num_steps // 2
    step_time = max((times[-1] - times[half - 1]) / (num_steps - half) for times in updates)
    busy = [sum(costs.of(action) for action in program) for program in schedule.programs]
    peaks = [_peaks(program, costs) for program in schedule.programs]
    return Price(
        step_time=step_time,
        bubble=tuple(max(0.0, 1 - time / step_time) if step_time else 0.0 for time in busy),
        in_flight=tuple(count for count, _ in peaks),
        peak_bytes=tuple(size for _, size in peaks),
        num_messages=sum(action.op in SENDS for program in schedule.programs for action in program),
        timeline=timeline,
    )


_WORK, _SEND, _RECEIVE = range(3)


class _Machine:
    """All ranks with their clocks and the channels between them."""

    def __init__(self, schedule: Schedule, layout: Layout, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.channels: list[deque[float]] = []  # arrival times of messages under way
        self.receivers: list[int] = []
        number: dict[tuple[int, int], int] = {}

        def channel(sender: int, receiver: int) -> int:
            if (sender, receiver) not in number:
                number[sender, receiver] = len(self.channels)
                self.channels.append(deque())
                self.receivers.append(receiver)
            return number[sender, receiver]

        # Actions as plain tuples (kind, channel, time): this loop runs millions of times.
        self.codes: list[list[tuple[int, int, float]]] = []
        for rank, program in enumerate(schedule.programs):
            codes = []
            for action in program:
                if action.op in SENDS:
                    codes.append((_SEND, channel(rank, receiver_of(action, layout)), costs.transfer(action)))
                elif action.op in COMPUTE or action.op is Op.UPDATE:
                    codes.append((_WORK, 0, costs.of(action)))
                else:
                    codes.append((_RECEIVE, channel(sender_of(action, layout), rank), 0.0))
            self.codes.append(codes)

    def run(self, num_steps: int) -> tuple[list[list[float]], tuple[tuple[Interval, ...], ...]]:
        """The time of every rank's updates, and the last step's compute in time."""
        num_ranks = len(self.codes)
        clocks, places, steps = [0.0] * num_ranks, [0] * num_ranks, [0] * num_ranks
        updates: list[list[float]] = [[] for _ in range(num_ranks)]
        timeline: list[list[Interval]] = [[] for _ in range(num_ranks)]
        free_at = [0.0] * len(self.channels)
        channels, receivers, latency = self.channels, self.receivers, self.costs.latency
        runnable, queued = deque(range(num_ranks)), [True] * num_ranks
        while runnable:
            rank = runnable.popleft()
            queued[rank] = False
            codes, program = self.codes[rank], self.schedule.programs[rank]
            clock, place, step = clocks[rank], places[rank], steps[rank]
            while step < num_steps:
                kind, channel, time = codes[place]
                if kind == _WORK:
                    if step == num_steps - 1:
                        timeline[rank].append(Interval(program[place], clock, clock + time))
                    clock += time
                elif kind == _SEND:
                    # Messages of one channel go out one after another.
                    free_at[channel] = max(clock, free_at[channel]) + time
                    channels[channel].append(free_at[channel] + latency)
                    receiver = receivers[channel]
                    if not queued[receiver]:
                        queued[receiver] = True
                        runnable.append(receiver)
                else:
                    if not channels[channel]:
                        break
                    clock = max(clock, channels[channel].popleft())
                place += 1
                if place == len(codes):
                    updates[rank].append(clock)
                    place, step = 0, step + 1
            clocks[rank], places[rank], steps[rank] = clock, place, step
        stuck = [rank for rank, step in enumerate(steps) if step < num_steps]
        if stuck:
            waits = ", ".join(f"rank {r} at {self.schedule.programs[r][places[r]]}" for r in stuck[:8])
            raise ValueError(f"the schedule deadlocks: {waits}; validate it to see why")
        return updates, tuple(map(tuple, timeline))


def _peaks(program: tuple[Action, ...], costs: Costs) -> tuple[int, float]:
    """The most micro-batches and bytes that a rank holds at once, in its program's order."""
    uses: dict[tuple[int, int], int] = {}
    for action in program:
        if action.op in COMPUTE:
            key = action.segment, action.microbatch
            uses[key] = uses.get(key, 0) + 1
    live: dict[int, int] = {}
    held = peak_held = 0.0
    peak_live = 0
    for action in program:
        if action.op not in COMPUTE:
            continue
        key = action.segment, action.microbatch
        if action.op is Op.FORWARD:
            live[action.microbatch] = live.get(action.microbatch, 0) + 1
            held += costs.held(action.segment)
            peak_live = max(peak_live, len(live))
            peak_held = max(peak_held, held + costs.passing(action.segment))
        uses[key] -= 1
        if uses[key] == 0:
            held -= costs.held(action.segment)
            live[action.microbatch] -= 1
            if live[action.microbatch] == 0:
                del live[action.microbatch]
    return peak_live, peak_held
