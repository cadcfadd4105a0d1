"""Runs one rank's program: a dispatch table over its actions.

There is no barrier between steps: a rank waits only in its receives. After a step every buffer is empty.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from mpc_dist.runtime.clock import Clock, HostClock, Moment
from mpc_dist.runtime.guard import Finding, Guard
from mpc_dist.runtime.microbatch import MicroBatches, Shares
from mpc_dist.runtime.reducer import Reduction
from mpc_dist.runtime.segment import Segment
from mpc_dist.runtime.transport import Transport
from mpc_dist.schedule.action import COMPUTE, RECEIVES, Action, Op, Program
from mpc_dist.schedule.simulator import Interval
from mpc_dist.schedule.work import Work


@dataclass
class StepRecord:
    """What one step left on one rank."""

    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    """By segment boundary: the mean loss of each micro-batch, in order of the program."""
    counts: dict[int, list[float]] = field(default_factory=dict)
    """How many labels each of these means is of."""
    clock: Clock = field(default_factory=HostClock)
    """Of all moments."""
    beginning: Moment = 0.0
    """When the step began."""
    moments: list[tuple[Action, Moment, Moment]] = field(default_factory=list)
    """When compute and update actions began and ended, if that was recorded."""
    most_in_flight: int = 0
    """Most micro-batches whose activations were held at once."""
    is_skipped: bool = False
    """Whether the update was left out, here and on every other rank."""
    finding: Finding | None = None
    """The number that was not finite, if this rank met one."""
    travels: list[tuple[Moment, Moment, int]] = field(default_factory=list)
    """When each bucket of gradients went to the other replicas and was back, and its bytes."""

    # What follows is for after the step: on a device it waits until the step is done.

    def _read(self, moment: Moment) -> float:
        return self.clock.read(moment, near=self.beginning)

    @cached_property
    def started(self) -> float:
        """When the step began, by the clock of the timeline."""
        return self._read(self.beginning)

    @cached_property
    def timeline(self) -> list[Interval]:
        """Compute and update actions with their times, if they were recorded."""
        return [Interval(action, self._read(start), self._read(end)) for action, start, end in self.moments]

    @cached_property
    def reductions(self) -> list[Reduction]:
        """When gradients travelled to the other replicas, bucket by bucket."""
        return [Reduction(self._read(start), self._read(end), size) for start, end, size in self.travels]

    @property
    def seconds(self) -> float:
        """From the step's beginning to the end of its last action; 0 if times were not recorded."""
        return self.timeline[-1].end - self.started if self.timeline else 0.0

    @property
    def busy_seconds(self) -> float:
        """Time spent in the recorded actions."""
        return sum(interval.end - interval.start for interval in self.timeline)


class Executor:
    """One rank's segments, buffers and program."""

    def __init__(
        self,
        program: Program,
        segments: Mapping[int, Segment],
        transport: Transport,
        work: Work,
        *,
        on_last_backward: Callable[[int, bool], None] = lambda _index, _is_read: None,
        on_segment_done: Callable[[int], None],
        on_update: Callable[[StepRecord], None],
        clock: Clock | None = None,
        guard: Guard | None = None,
    ) -> None:
        """With a clock, every action's times are recorded."""
        self._program = program
        self._receives = [action for action in program if action.op in RECEIVES]
        self._segments = segments
        self._transport = transport
        self._num_microbatches = work.num_microbatches
        self._on_last_backward = on_last_backward
        self._on_segment_done = on_segment_done
        self._on_update = on_update
        self._clock = clock
        self._last_action = 0.0
        """When this thread was done with one, whatever the device is at; 0 before the first step."""
        self._guard = guard or Guard()
        self._is_guarded = self._guard.is_on
        self._targets = {s: work.layout.windows.targets[s] for s in segments}
        self._carried = {s: work.carried_readout(s) for s in segments}
        self._sends = {action: work.messages_made(action) for action in program if action.op is Op.FORWARD}
        self._num_adjoint_uses = {
            (s, readout): work.layout.windows.is_target(s, readout) + work.is_relayed(s, readout)
            for s in segments
            for readout in work.layout.windows.readouts_crossing(s)
        }
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.FORWARD: self._forward,
            Op.RELAY: self._relay,
            Op.BACKWARD: self._backward,
            Op.INPUT_HALF: self._input_half,
            Op.WEIGHT_HALF: self._weight_half,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.SEND_ADJOINT: self._send_adjoint,
            Op.RECEIVE_ACTIVATION: self._receive_activation,
            Op.RECEIVE_ADJOINT: self._receive_adjoint,
            Op.UPDATE: self._update,
        }
        self._place = 0
        self._record = StepRecord()
        self._inputs: Sequence[Tensor] = ()
        self._labels: Sequence[Tensor] = ()
        self._shares = Shares(())
        self._unread: dict[tuple[int, int], Tensor] = {}  # outputs whose loss has not been read yet
        self._activations: dict[tuple[int, int], Tensor] = {}  # entering (segment, micro-batch)
        self._adjoints: dict[tuple[int, int, int], Tensor] = {}  # at the output of (segment, micro-batch) of a readout
        self._adjoint_uses: dict[tuple[int, int, int], int] = {}
        self._outgoing: dict[Action, Tensor] = {}
        self._backwards_left: dict[int, int] = {}

    def start_step(self, batch: MicroBatches, shares: Shares) -> None:
        """Begin a step on these micro-batches; a rank uses what it needs of them."""
        assert self._place == 0
        self._last_action = time.perf_counter()
        clock = self._clock
        self._record = StepRecord() if clock is None else StepRecord(clock=clock, beginning=clock.now())
        self._inputs, self._labels, self._shares = batch.inputs, batch.labels, shares
        self._backwards_left = dict.fromkeys(self._segments, self._num_microbatches)
        self._transport.expect(self._receives)

    def run(self) -> StepRecord | None:
        """Go on with the step; None if it has to wait for another rank of this process."""
        program, handlers, clock = self._program, self._handlers, self._clock
        while self._place < len(program):
            action = program[self._place]
            if action.op in RECEIVES and not self._transport.is_ready(action):
                return None
            if clock is not None and (action.op in COMPUTE or action.op is Op.UPDATE):
                start = clock.now()
                handlers[action.op](action)
                self._record.moments.append((action, start, clock.now()))
            else:
                handlers[action.op](action)
            self._place += 1
            self._last_action = time.perf_counter()
        self._place = 0
        return self._record

    @property
    def place(self) -> int:
        """How many actions of the step have been done."""
        return self._place

    def describe(self) -> dict[str, Any]:
        """What it is doing, for another thread."""
        program, place = self._program, self._place
        action = program[place] if place < len(program) else None
        last = self._last_action
        buffers = (self._unread, self._activations, self._adjoints, self._outgoing)
        held = {id(tensor): tensor.nbytes for buffer in buffers for tensor in list(buffer.values())}
        held |= {id(tensor): tensor.nbytes for segment in self._segments.values() for tensor in segment.held()}
        return {
            "action": None if action is None else str(action),
            "microbatch": None if action is None else action.microbatch,
            "place": f"{place + 1} of {len(program)}",
            "seconds_since_last_action": round(time.perf_counter() - last, 3) if last else None,
            "in_flight": sorted({m for segment in self._segments.values() for m in list(segment.in_flight)}),
            "buffer_bytes": sum(held.values()),
        }

    def left_over(self) -> list[str]:
        """What is still in a buffer; nothing after a step."""
        buffers = {
            "unread": [str(key) for key in self._unread],
            "activations": [str(key) for key in self._activations],
            "adjoints": [str(key) for key in self._adjoints],
            "outgoing": [str(action) for action in self._outgoing],
            "segments": [str(index) for index, segment in self._segments.items() if segment.in_flight],
        }
        return [f"{name}: {', '.join(keys)}" for name, keys in buffers.items() if keys]

    def _forward(self, action: Action) -> None:
        _, index, microbatch, _ = action
        state = self._inputs[microbatch] if index == 0 else self._activations.pop((index, microbatch))
        if self._is_guarded and index == 0 and state.is_floating_point():
            self._guard.see("data", 0, microbatch, state)
        output = self._segments[index].forward(microbatch, state)
        self._count_in_flight()
        if self._segments[index].readout is not None:
            self._unread[index, microbatch] = output
        for send in self._sends[action]:
            self._outgoing[send] = output
        if index + 1 in self._segments:
            self._activations[index + 1, microbatch] = output

    def _count_in_flight(self) -> None:
        held = [segment.in_flight for segment in self._segments.values()]
        number = len(held[0]) if len(held) == 1 else len(frozenset().union(*held))
        self._record.most_in_flight = max(self._record.most_in_flight, number)

    def _read(self, index: int, microbatch: int) -> None:
        """Read a segment's own loss: when its adjoint is first used, so that the next rank need not wait for it."""
        state = self._unread.pop((index, microbatch))
        count = self._shares.counts[microbatch]
        share = self._shares.of(microbatch) if count else 0.0
        reading = self._segments[index].read(microbatch, state, self._labels[microbatch], share)
        self._record.losses.setdefault(index + 1, []).append(reading.loss)
        self._record.counts.setdefault(index + 1, []).append(count)
        if self._is_guarded:
            block = self._segments[index].range[-1]
            self._guard.see("loss", block, microbatch, reading.loss)
            self._guard.see("adjoint", block, microbatch, reading.adjoint)
        self._keep_adjoint(index, microbatch, index + 1, reading.adjoint)

    def _keep_adjoint(self, index: int, microbatch: int, readout: int, adjoint: Tensor) -> None:
        self._adjoints[index, microbatch, readout] = adjoint
        self._adjoint_uses[index, microbatch, readout] = self._num_adjoint_uses[index, readout]

    def _use_adjoint(self, index: int, microbatch: int, readout: int) -> Tensor:
        key = index, microbatch, readout
        if (index, microbatch) in self._unread and readout == index + 1:
            self._read(index, microbatch)
        self._adjoint_uses[key] -= 1
        if self._adjoint_uses[key]:
            return self._adjoints[key]
        del self._adjoint_uses[key]
        return self._adjoints.pop(key)

    def _pass_on(self, action: Action, readout: int, adjoint: Tensor) -> None:
        """Hand an adjoint to the segment below, here or on another rank."""
        if self._is_guarded:
            self._see_adjoint(action, adjoint)
        if action.segment - 1 in self._segments:
            self._keep_adjoint(action.segment - 1, action.microbatch, readout, adjoint)
        else:
            self._outgoing[Action(Op.SEND_ADJOINT, action.segment, action.microbatch, readout)] = adjoint

    def _see_adjoint(self, action: Action, adjoint: Tensor) -> None:
        blocks = self._segments[action.segment].range
        self._guard.see("adjoint", blocks[0], action.microbatch, adjoint, segment=blocks)

    def _relay(self, action: Action) -> None:
        _, index, microbatch, readout = action
        below = self._segments[index].relay(microbatch, self._use_adjoint(index, microbatch, readout))
        self._pass_on(action, readout, below)

    def _target_adjoint(self, action: Action) -> Tensor:
        """The weighted sum of the adjoints that the segment's weights learn from."""
        total = None
        for readout, weight in self._targets[action.segment]:
            adjoint = self._use_adjoint(action.segment, action.microbatch, readout)
            weighted = adjoint if weight == 1 else adjoint * weight
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    def _backward(self, action: Action) -> None:
        readout = self._carried[action.segment]
        adjoint = self._target_adjoint(action)
        self._announce_last(action)
        below = self._segments[action.segment].backward(action.microbatch, adjoint, to_input=readout is not None)
        if readout is not None:
            assert below is not None
            self._pass_on(action, readout, below)
        elif self._is_guarded:
            self._segments[action.segment].see_backward(action.microbatch)
        self._count_backward(action.segment)

    def _input_half(self, action: Action) -> None:
        below = self._segments[action.segment].input_half(action.microbatch, self._target_adjoint(action))
        readout = self._carried[action.segment]
        if readout is not None:
            self._pass_on(action, readout, below)
        elif self._is_guarded:
            self._see_adjoint(action, below)

    def _weight_half(self, action: Action) -> None:
        self._announce_last(action)
        self._segments[action.segment].weight_half(action.microbatch)
        self._count_backward(action.segment)

    def _announce_last(self, action: Action) -> None:
        """Say that a segment's last backward of this step begins, and whether its own losses have all been read."""
        if self._backwards_left[action.segment] == 1:
            self._on_last_backward(action.segment, all(index != action.segment for index, _ in self._unread))

    def _count_backward(self, index: int) -> None:
        self._backwards_left[index] -= 1
        if self._backwards_left[index] == 0:
            if self._is_guarded:
                self._segments[index].see_gradients()
            self._on_segment_done(index)

    def _send_activation(self, action: Action) -> None:
        self._transport.send(action, self._outgoing.pop(action))

    def _send_adjoint(self, action: Action) -> None:
        self._transport.send(action, self._outgoing.pop(action))

    def _receive_activation(self, action: Action) -> None:
        activation = self._activations[action.segment, action.microbatch] = self._transport.receive(action)
        if self._is_guarded and activation.is_floating_point():
            block = self._segments[action.segment].range[0]
            self._guard.see("activation", block, action.microbatch, activation, is_received=True)

    def _receive_adjoint(self, action: Action) -> None:
        adjoint = self._transport.receive(action)
        if self._is_guarded:
            block = self._segments[action.segment].range[-1]
            self._guard.see("adjoint", block, action.microbatch, adjoint, is_received=True)
        self._keep_adjoint(action.segment, action.microbatch, action.readout, adjoint)

    def _update(self, action: Action) -> None:  # noqa: ARG002
        self._on_update(self._record)
