"""The work of a step: every compute action that a layout needs, and what each of them waits for.

The builder orders it, the communication pass reads from it what crosses ranks, the validator holds programs against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpc_dist.schedule.action import Action, Op
from mpc_dist.schedule.layout import Layout


@dataclass(frozen=True)
class Work:
    """The compute actions of a layout's step and their dependencies."""

    layout: Layout
    num_microbatches: int
    is_split: bool
    """Whether each backward is an input half and a weight half."""

    def actions_of(self, segment: int) -> Iterator[Action]:
        """The compute actions of one segment for micro-batch 0; every micro-batch has the same."""
        yield Action(Op.FORWARD, segment, 0)
        for readout in self.layout.windows.readouts_crossing(segment):
            if self.is_relayed(segment, readout):
                yield Action(Op.RELAY, segment, 0, readout)
        if self.splits(segment):
            yield Action(Op.INPUT_HALF, segment, 0)
            yield Action(Op.WEIGHT_HALF, segment, 0)
        else:
            yield Action(Op.BACKWARD, segment, 0)

    def splits(self, segment: int) -> bool:
        """Whether the segment's backward is in two halves; the first segment's input needs no gradient."""
        return self.is_split and segment > 0

    def goes_on(self, segment: int, readout: int) -> bool:
        """Whether the readout's adjoint must pass on below this segment."""
        return segment > self.layout.windows.stop_of(readout)

    def is_relayed(self, segment: int, readout: int) -> bool:
        """Whether the adjoint crosses by a relay: not if the segment's own backward carries it.

        A backward carries the adjoint of a segment's only target of weight 1. The adjoints of several targets are
        weighted and summed before one weight pass, and a sum cannot be told apart again, so each that goes on is
        relayed beside it.
        """
        return self.goes_on(segment, readout) and not self.is_carried(segment, readout)

    def is_carried(self, segment: int, readout: int) -> bool:
        """Whether the segment's backward is also what passes this readout's adjoint on."""
        return self.layout.windows.targets[segment] == ((readout, 1.0),) and self.goes_on(segment, readout)

    def carried_readout(self, segment: int) -> int | None:
        """The readout whose adjoint the segment's backward passes on, if any."""
        readout = self.layout.windows.targets[segment][0][0]
        return readout if self.is_carried(segment, readout) else None

    def source_of_adjoint(self, segment: int, microbatch: int, readout: int) -> Action:
        """The action that makes the adjoint of a readout at this segment's output."""
        if readout == segment + 1:
            return Action(Op.FORWARD, segment, microbatch)
        above = segment + 1
        if self.is_carried(above, readout):
            return Action(Op.INPUT_HALF if self.splits(above) else Op.BACKWARD, above, microbatch)
        return Action(Op.RELAY, above, microbatch, readout)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The compute actions whose results this one uses."""
        op, segment, microbatch, readout = action
        if op is Op.FORWARD:
            return (Action(Op.FORWARD, segment - 1, microbatch),) if segment else ()
        if op is Op.RELAY:
            return (Action(Op.FORWARD, segment, microbatch), self.source_of_adjoint(segment, microbatch, readout))
        if op is Op.WEIGHT_HALF:
            return (Action(Op.INPUT_HALF, segment, microbatch),)
        targets = self.layout.windows.targets[segment]
        sources = [self.source_of_adjoint(segment, microbatch, boundary) for boundary, _ in targets]
        return (Action(Op.FORWARD, segment, microbatch), *sources)

    def messages_needed(self, action: Action) -> tuple[Action, ...]:
        """The receives that this action's rank needs before it, as receive actions."""
        op, segment, microbatch, readout = action
        ranks, here = self.layout.ranks, self.layout.ranks[segment]
        if op is Op.FORWARD:
            crosses = segment > 0 and ranks[segment - 1] != here
            return (Action(Op.RECEIVE_ACTIVATION, segment, microbatch),) if crosses else ()
        if op is Op.WEIGHT_HALF or segment + 1 >= len(ranks) or ranks[segment + 1] == here:
            return ()
        readouts = [readout] if op is Op.RELAY else [boundary for boundary, _ in self.layout.windows.targets[segment]]
        return tuple(Action(Op.RECEIVE_ADJOINT, segment, microbatch, s) for s in readouts if s != segment + 1)

    def messages_made(self, action: Action) -> tuple[Action, ...]:
        """The sends that this action's rank owes after it, as send actions."""
        op, segment, microbatch, readout = action
        ranks, here = self.layout.ranks, self.layout.ranks[segment]
        if op is Op.FORWARD:
            crosses = segment + 1 < len(ranks) and ranks[segment + 1] != here
            return (Action(Op.SEND_ACTIVATION, segment, microbatch),) if crosses else ()
        if op is Op.WEIGHT_HALF or segment == 0 or ranks[segment - 1] == here:
            return ()
        passed_on = readout if op is Op.RELAY else self.carried_readout(segment)
        return () if passed_on is None else (Action(Op.SEND_ADJOINT, segment, microbatch, passed_on),)


def matching_receive(send: Action) -> Action:
    """The receive that takes what this action sends."""
    if send.op is Op.SEND_ACTIVATION:
        return Action(Op.RECEIVE_ACTIVATION, send.segment + 1, send.microbatch)
    return Action(Op.RECEIVE_ADJOINT, send.segment - 1, send.microbatch, send.readout)
