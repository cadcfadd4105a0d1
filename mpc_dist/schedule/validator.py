"""Proves a schedule complete, matched per channel, free of deadlock and within its cap, or says where it is wrong.

It runs the programs on an abstract machine that knows which results exist on which rank, and nothing of their values.
Every result must be there when it is used, be used by all who need it, and be gone after the step: then the next step
may follow at once.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from mpc_dist.schedule.action import RECEIVES, SENDS, Action, Op, Schedule
from mpc_dist.schedule.communication import receiver_of, sender_of
from mpc_dist.schedule.layout import Layout
from mpc_dist.schedule.work import Work, matching_receive


class ScheduleError(ValueError):
    """A schedule that would give wrong results, wait for ever or hold too much."""


@dataclass
class _Rank:
    """What one rank has on the abstract machine."""

    place: int = 0
    done: set[Action] = field(default_factory=set)
    activations: set[tuple[int, int]] = field(default_factory=set)
    """(segment, micro-batch) whose input activation is here and unused."""
    outgoing: set[Action] = field(default_factory=set)
    """Sends that are owed."""
    adjoints: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(segment, micro-batch, readout) of adjoints at that segment's output, with how many uses are left."""
    to_do: dict[tuple[int, int], int] = field(default_factory=dict)
    """(segment, micro-batch) that were run forward, with how many of their adjoint actions are left."""


def validate(schedule: Schedule, layout: Layout, *, cap: int | None = None) -> None:
    """Raise `ScheduleError`, with the grid and the bad cell marked, unless the schedule is right."""
    if schedule.num_ranks != layout.num_ranks:
        raise ScheduleError(f"the schedule has {schedule.num_ranks} ranks but the layout {layout.num_ranks}")
    _Validation(schedule, layout, cap).run()


class _Validation:
    def __init__(self, schedule: Schedule, layout: Layout, cap: int | None) -> None:
        self.schedule = schedule
        self.layout = layout
        self.cap = cap
        # Halves and whole backwards may be mixed; what each segment needs besides is the same for both.
        self.work = Work(layout, schedule.num_microbatches, is_split=False)
        self.ranks = [_Rank() for _ in schedule.programs]
        self.channels: dict[tuple[int, int], deque[Action]] = defaultdict(
            deque
        )  # receives to come, by (sender, receiver)

    def run(self) -> None:
        # To and fro: activations go up the ranks and adjoints down, and a sweep takes them along.
        order = list(enumerate(self.schedule.programs))
        moved = True
        while moved:
            moved = False
            for rank, program in order:
                while self.ranks[rank].place < len(program) and self._step(rank, program[self.ranks[rank].place]):
                    self.ranks[rank].place += 1
                    moved = True
            order.reverse()
        stuck = [rank for rank, program in enumerate(self.schedule.programs) if self.ranks[rank].place < len(program)]
        if stuck:
            waits = ", ".join(f"rank {r} at {self.schedule.programs[r][self.ranks[r].place]}" for r in stuck)
            self._fail(stuck[0], f"deadlock: {waits}")
        for rank, program in enumerate(self.schedule.programs):
            if not program or program[-1].op is not Op.UPDATE:
                self._fail(rank, "the program does not end with its update U")
        for (sender, receiver), messages in self.channels.items():
            if messages:
                self._fail(receiver, f"never receives {messages[0]}, which rank {sender} sends")

    def _step(self, rank: int, action: Action) -> bool:
        """Do the action; False if it has to wait for a message."""
        state = self.ranks[rank]
        if action.op is Op.UPDATE:
            self._check_finished(rank)
            return True
        if action.op not in RECEIVES:
            if action in state.done:
                self._fail(rank, "is done twice")
            state.done.add(action)
        if not (
            0 <= action.segment < self.layout.num_segments and 0 <= action.microbatch < self.schedule.num_microbatches
        ):
            self._fail(rank, "names a segment or micro-batch that does not exist")
        if self.layout.ranks[action.segment] != rank:
            self._fail(rank, f"belongs to rank {self.layout.ranks[action.segment]}")
        if action.op in SENDS:
            self._send(rank, action)
        elif action.op in RECEIVES:
            return self._receive(rank, action)
        elif action.op is Op.FORWARD:
            self._forward(rank, action)
        else:
            self._backward(rank, action)
        return True

    def _send(self, rank: int, action: Action) -> None:
        state = self.ranks[rank]
        if action not in state.outgoing:
            self._fail(rank, "sends what has not been made")
        state.outgoing.remove(action)
        self.channels[rank, receiver_of(action, self.layout)].append(matching_receive(action))

    def _receive(self, rank: int, action: Action) -> bool:
        step = -1 if action.op is Op.RECEIVE_ACTIVATION else 1
        if not 0 <= action.segment + step < self.layout.num_segments:
            self._fail(rank, "receives from beyond the end of the chain")
        channel = self.channels[sender_of(action, self.layout), rank]
        if not channel:
            return False
        if channel[0] != action:
            self._fail(rank, f"is out of order: the next message of its channel is {channel[0]}")
        channel.popleft()
        if action.op is Op.RECEIVE_ACTIVATION:
            self.ranks[rank].activations.add((action.segment, action.microbatch))
        else:
            self._add_adjoint(rank, action.segment, action.microbatch, action.readout)
        return True

    def _forward(self, rank: int, action: Action) -> None:
        state, (_, segment, microbatch, _) = self.ranks[rank], action
        if segment > 0:
            if (segment, microbatch) not in state.activations:
                self._fail(rank, "its input activation is not there")
            state.activations.remove((segment, microbatch))
        relays = sum(self.work.is_relayed(segment, s) for s in self.layout.windows.readouts_crossing(segment))
        state.to_do[segment, microbatch] = relays + 1
        in_flight = {other for _, other in state.to_do}
        if self.cap is not None and len(in_flight) > self.cap:
            self._fail(rank, f"holds {len(in_flight)} micro-batches, more than the cap of {self.cap}")
        if segment + 1 < self.layout.num_segments and self.layout.ranks[segment + 1] == rank:
            state.activations.add((segment + 1, microbatch))
        if segment + 1 in self.layout.windows.readouts:
            self._add_adjoint(rank, segment, microbatch, segment + 1)
        state.outgoing.update(self.work.messages_made(action))

    def _backward(self, rank: int, action: Action) -> None:
        state, (op, segment, microbatch, readout) = self.ranks[rank], action
        if (segment, microbatch) not in state.to_do:
            self._fail(rank, "its segment holds no activations: it was not run forward, or everything was done")
        whole, halves = (Action(o, segment, microbatch) for o in (Op.BACKWARD, Op.INPUT_HALF))
        if op is Op.WEIGHT_HALF:
            if halves not in state.done:
                self._fail(rank, "comes before its input half")
            self._finish(rank, segment, microbatch)
            return
        if op is Op.RELAY:
            if readout not in self.layout.windows.readouts or not self.work.is_relayed(segment, readout):
                self._fail(rank, "relays an adjoint that does not cross this segment so")
            uses = [readout]
        else:
            if whole in state.done and halves in state.done:
                self._fail(rank, "is done twice, whole and in halves")
            uses = [boundary for boundary, _ in self.layout.windows.targets[segment]]
        for used in uses:
            key = segment, microbatch, used
            if key not in state.adjoints:
                self._fail(rank, f"the adjoint of readout {used} is not there")
            state.adjoints[key] -= 1
            if state.adjoints[key] == 0:
                del state.adjoints[key]
        passed_on = readout if op is Op.RELAY else self.work.carried_readout(segment)
        if passed_on is not None and self.layout.ranks[segment - 1] == rank:
            self._add_adjoint(rank, segment - 1, microbatch, passed_on)
        state.outgoing.update(
            self.work.messages_made(action._replace(op=Op.BACKWARD) if op is Op.INPUT_HALF else action)
        )
        if op is not Op.INPUT_HALF:
            self._finish(rank, segment, microbatch)

    def _add_adjoint(self, rank: int, segment: int, microbatch: int, readout: int) -> None:
        uses = self.layout.windows.is_target(segment, readout) + self.work.is_relayed(segment, readout)
        self.ranks[rank].adjoints[segment, microbatch, readout] = uses

    def _finish(self, rank: int, segment: int, microbatch: int) -> None:
        to_do = self.ranks[rank].to_do
        to_do[segment, microbatch] -= 1
        if to_do[segment, microbatch] == 0:
            del to_do[segment, microbatch]

    def _check_finished(self, rank: int) -> None:
        state = self.ranks[rank]
        for segment in self.layout.segments[rank]:
            for microbatch in range(self.schedule.num_microbatches):
                if Action(Op.FORWARD, segment, microbatch) not in state.done:
                    self._fail(rank, f"F{segment}.{microbatch} has not been done")
        if state.to_do:
            (segment, microbatch), _ = min(state.to_do.items())
            self._fail(rank, f"segment {segment} has not finished micro-batch {microbatch}")
        if state.outgoing:
            self._fail(rank, f"{min(state.outgoing, key=str)} has not been sent")
        if state.activations or state.adjoints:
            self._fail(rank, f"results are left over: {sorted(state.activations)} {sorted(state.adjoints)}")
        if state.place + 1 < len(self.schedule.programs[rank]):
            self._fail(rank, "the update is not the last action")

    def _fail(self, rank: int, reason: str) -> None:
        place = self.ranks[rank].place
        raise ScheduleError(describe_failure(self.schedule, rank, place, reason))


def describe_failure(schedule: Schedule, rank: int, place: int, reason: str, *, around: int = 6) -> str:
    """The programs around the bad action, which is marked; its rank's line and those of its neighbours."""
    program = schedule.programs[rank]
    name = f"action {place} ({program[place]})" if place < len(program) else "the end"
    lines = [f"rank {rank}, {name}: {reason}"]
    for other in range(max(0, rank - 1), min(schedule.num_ranks, rank + 2)):
        words = [str(action) for action in schedule.programs[other]]
        start = max(0, place - around)
        if other == rank and place < len(words):
            words[place] = f">>{words[place]}<<"
        shown = " ".join(words[start : place + around + 1])
        lines.append(
            f"  rank {other}: {'... ' if start else ''}{shown}{' ...' if place + around + 1 < len(words) else ''}"
        )
    return "\n".join(lines)
