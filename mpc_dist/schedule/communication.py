"""Adds sends and receives to a schedule of compute actions.

Messages have no tags: on each channel (one per pair of neighbours and direction) the receiver takes them in the order
in which the sender's program sends them. Both orders come from this one pass.
"""

from collections import defaultdict, deque

from mpc_dist.schedule.action import RECEIVES, SENDS, Action, Schedule
from mpc_dist.schedule.layout import Layout
from mpc_dist.schedule.work import Work, matching_receive


def add_communication(schedule: Schedule, layout: Layout) -> Schedule:
    """Each send right after what makes it, each receive just before what first needs it or a later message."""
    work = Work(layout, schedule.num_microbatches, schedule.is_split)
    arriving: dict[tuple[int, int], deque[Action]] = defaultdict(deque)  # by (receiving rank, sending rank)
    for rank, program in enumerate(schedule.programs):
        for action in _compute_actions(program):
            for send in work.messages_made(action):
                receive = matching_receive(send)
                arriving[layout.ranks[receive.segment], rank].append(receive)

    programs = []
    for rank, program in enumerate(schedule.programs):
        lowered: list[Action] = []
        received: set[Action] = set()
        for action in program:
            if action.segment < 0:
                lowered.append(action)
                continue
            for needed in work.messages_needed(action):
                sender = sender_of(needed, layout)
                while needed not in received:
                    message = arriving[rank, sender].popleft()
                    received.add(message)
                    lowered.append(message)
            lowered.append(action)
            lowered.extend(work.messages_made(action))
        programs.append(tuple(lowered))
    return Schedule(tuple(programs), schedule.num_microbatches)


def remove_communication(schedule: Schedule) -> Schedule:
    """The schedule's compute actions and updates alone."""
    programs = tuple(
        tuple(action for action in program if action.op not in SENDS and action.op not in RECEIVES)
        for program in schedule.programs
    )
    return Schedule(programs, schedule.num_microbatches)


def sender_of(receive: Action, layout: Layout) -> int:
    """The rank from which a receive takes its message."""
    step = -1 if receive.op.value == "RA" else 1
    return layout.ranks[receive.segment + step]


def receiver_of(send: Action, layout: Layout) -> int:
    """The rank to which a send goes."""
    return layout.ranks[matching_receive(send).segment]


def _compute_actions(program: tuple[Action, ...]) -> list[Action]:
    return [action for action in program if action.segment >= 0]
