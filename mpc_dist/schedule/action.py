"""A schedule is data: per rank, the actions of ONE optimizer step. It prints and parses as text and knows no tensors.

F3.0      forward of segment 3, micro-batch 0; the loss at its end is read when its adjoint is first used
R3.0@5    relay: the adjoint of readout 5 crosses segment 3 as an input gradient only
B3.0      backward: weight gradients of segment 3 from its targets' adjoints (and the input gradient if one goes on)
I3.0 W3.0 the same backward in two halves: what others wait for, and the weight gradients
SA3.0 RA3.0     send the activation that leaves segment 3; receive the one that enters segment 3
SD3.0@5 RD3.0@5 send the adjoint of readout 5 that leaves segment 3's input; receive the one at segment 3's output
U         update: the optimizer step
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Op(str, Enum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    RELAY = "R"
    BACKWARD = "B"
    INPUT_HALF = "I"
    WEIGHT_HALF = "W"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_ADJOINT = "SD"
    RECEIVE_ADJOINT = "RD"
    UPDATE = "U"

    # The members are dictionary keys in every inner loop: identity is enough, and faster than hashing the text.
    __hash__ = object.__hash__


COMPUTE = frozenset({Op.FORWARD, Op.RELAY, Op.BACKWARD, Op.INPUT_HALF, Op.WEIGHT_HALF})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_ADJOINT})
RECEIVES = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_ADJOINT})
WITH_READOUT = frozenset({Op.RELAY, Op.SEND_ADJOINT, Op.RECEIVE_ADJOINT})


class Action(NamedTuple):
    """One thing that a rank does."""

    op: Op
    segment: int = -1
    microbatch: int = -1
    readout: int = -1
    """Only for relays and adjoint messages: the segment boundary whose loss the adjoint is of."""

    def __str__(self) -> str:
        if self.op is Op.UPDATE:
            return "U"
        readout = f"@{self.readout}" if self.op in WITH_READOUT else ""
        return f"{self.op.value}{self.segment}.{self.microbatch}{readout}"


_PATTERN = re.compile(r"(SA|RA|SD|RD|F|R|B|I|W)(\d+)\.(\d+)(?:@(\d+))?")


def parse_action(text: str) -> Action:
    """Read an action as it prints."""
    if text == Op.UPDATE.value:
        return Action(Op.UPDATE)
    match = _PATTERN.fullmatch(text)
    if not match or (Op(match[1]) in WITH_READOUT) != (match[4] is not None):
        raise ValueError(f"{text!r} is no action; write e.g. F3.0, R3.0@5, B3.0, I3.0, W3.0, SA3.0, RD3.0@5 or U")
    return Action(Op(match[1]), int(match[2]), int(match[3]), int(match[4] or -1))


Program = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one optimizer step."""

    programs: tuple[Program, ...]
    """`programs[rank]`, in order."""
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return len(self.programs)

    @property
    def is_split(self) -> bool:
        """Whether any backward is in two halves."""
        return any(action.op is Op.INPUT_HALF for program in self.programs for action in program)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, program)) for program in self.programs)


def parse_schedule(text: str) -> Schedule:
    """Read a schedule as it prints: a line per rank."""
    programs = tuple(tuple(parse_action(word) for word in line.split()) for line in text.strip().splitlines())
    return Schedule(programs, 1 + max((action.microbatch for program in programs for action in program), default=-1))


def replace_program(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Schedule:
    """The schedule with another program on one rank."""
    programs = [*schedule.programs]
    programs[rank] = tuple(actions)
    return Schedule(tuple(programs), schedule.num_microbatches)
