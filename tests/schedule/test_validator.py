"""The validator is complete: every mutation of a valid schedule is caught, or is only another valid order."""

from collections import Counter
from collections.abc import Iterator

import pytest

from mpc_dist.schedule import (
    Action,
    Costs,
    Layout,
    Op,
    Schedule,
    ScheduleError,
    build_schedule,
    lay_out,
    simulate,
    validate,
)
from mpc_dist.schedule.action import WITH_READOUT, parse_schedule, replace_program
from mpc_dist.windows import backprop, cumulative, loco, sliding, tumbling

CASES = {
    "sliding 2": (lay_out(sliding(4, 2), [1] * 4), 2, False),
    "sliding 3 split": (lay_out(sliding(5, 3), [1] * 5), 3, True),
    "backprop split": (lay_out(backprop(3), [1] * 3), 3, True),
    "backprop": (lay_out(backprop(4), [2, 1, 1]), 3, False),
    "tumbling split": (lay_out(tumbling(6, 3), [2, 2, 2]), 2, True),
    "loco": (lay_out(loco(5), [2, 1, 2]), 2, False),
    "cumulative split": (lay_out(cumulative(4, 3), [1, 2, 1]), 2, True),
    "anchored": (lay_out(sliding(6, 2, [3, 4, 6]), [1, 3, 2]), 2, False),
}


def is_valid(schedule: Schedule, layout: Layout) -> bool:
    try:
        validate(schedule, layout)
    except ScheduleError:
        return False
    return True


def mutate(schedule: Schedule, mutation: str, layout: Layout) -> Iterator[Schedule]:
    for rank, program in enumerate(schedule.programs):
        for place, action in enumerate(program):
            before, after = program[:place], program[place + 1 :]
            if mutation == "drop":
                yield replace_program(schedule, rank, before + after)
            elif mutation == "duplicate":
                yield replace_program(schedule, rank, (*before, action, action, *after))
            elif mutation == "move":
                for target in range(len(program) - 1):
                    if target != place:
                        rest = before + after
                        yield replace_program(schedule, rank, (*rest[:target], action, *rest[target:]))
            elif mutation == "retarget" and action.op is not Op.UPDATE:
                for other in retargeted(action, schedule, layout):
                    yield replace_program(schedule, rank, (*before, other, *after))


def retargeted(action: Action, schedule: Schedule, layout: Layout) -> Iterator[Action]:
    """The action with another segment, micro-batch, readout or kind."""
    for segment in range(-1, layout.num_segments + 1):
        yield action._replace(segment=segment)
    for microbatch in range(-1, schedule.num_microbatches + 1):
        yield action._replace(microbatch=microbatch)
    if action.op in WITH_READOUT:
        for readout in range(layout.num_segments + 2):
            yield action._replace(readout=readout)
    for op in Op:
        readout = -1 if op not in WITH_READOUT else action.readout if action.readout > 0 else action.segment + 1
        yield action._replace(op=op, readout=readout)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mutation", ["drop", "duplicate", "retarget"])
def test_a_dropped_duplicated_or_retargeted_action_is_always_caught(case, mutation):
    layout, num_microbatches, split = CASES[case]
    schedule = build_schedule(layout, num_microbatches, split=split)
    validate(schedule, layout)
    mutants = [mutant for mutant in mutate(schedule, mutation, layout) if mutant != schedule]
    assert len(mutants) >= sum(map(len, schedule.programs)) - layout.num_ranks
    survivors = [mutant for mutant in mutants if is_valid(mutant, layout)]
    assert not survivors, str(survivors[0])


@pytest.mark.parametrize("case", CASES)
def test_a_moved_action_is_caught_or_gives_another_valid_order(case):
    """Harmless moves exist: the same actions, every result still made before it is used, channels still matched."""
    layout, num_microbatches, split = CASES[case]
    schedule = build_schedule(layout, num_microbatches, split=split)
    costs = Costs.uniform([1.0] * layout.num_segments)
    caught = 0
    for mutant in mutate(schedule, "move", layout):
        if not is_valid(mutant, layout):
            caught += 1
            continue
        assert [Counter(p) for p in mutant.programs] == [Counter(p) for p in schedule.programs]
        assert simulate(mutant, layout, costs, num_steps=2).step_time > 0
        for program in mutant.programs:
            assert_order(program)
    assert caught > 0


def assert_order(program: tuple[Action, ...]) -> None:
    """Within a rank: forward before relays and backward, input half before weight half, update last."""
    place = {action: index for index, action in enumerate(program)}
    for action, index in place.items():
        if action.op in (Op.RELAY, Op.BACKWARD, Op.INPUT_HALF):
            assert place[Action(Op.FORWARD, action.segment, action.microbatch)] < index
        if action.op is Op.WEIGHT_HALF:
            assert place[Action(Op.INPUT_HALF, action.segment, action.microbatch)] < index
    assert program[-1].op is Op.UPDATE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "F0.0 SA0.0 B0.0 U\nRA1.0 F1.0 B1.0 SD1.0@2 U",
            "rank 0, action 2 (B0.0): the adjoint of readout 2 is not there",
        ),
        ("F0.0 SA0.0 RD0.0@2 B0.0 U\nRA1.0 F1.0 B1.0 U", "rank 1, action 3 (U): SD1.0@2 has not been sent"),
        ("F0.0 RD0.0@2 SA0.0 B0.0 U\nRA1.0 F1.0 B1.0 SD1.0@2 U", "deadlock: rank 0 at RD0.0@2, rank 1 at RA1.0"),
        ("F0.0 SA0.0 RD0.0@2 B0.0 U\nRA1.0 F1.0 B1.0 SD1.0@2", "rank 1, the end: the program does not end with"),
        (
            "F0.0 SA0.0 RD0.0@2 B0.0 U\nF1.0 RA1.0 B1.0 SD1.0@2 U",
            "rank 1, action 0 (F1.0): its input activation is not",
        ),
        ("F0.0 SA0.0 RD0.0@2 U B0.0\nRA1.0 F1.0 B1.0 SD1.0@2 U", "segment 0 has not finished micro-batch 0"),
    ],
)
def test_the_error_names_the_cell_and_marks_it(text, reason):
    layout = lay_out(backprop(2), [1, 1])
    with pytest.raises(ScheduleError) as caught:
        validate(parse_schedule(text), layout)
    message = str(caught.value)
    assert reason in message
    assert ("the end" in reason) or (">>" in message and "<<" in message)
    assert "rank 0:" in message


def test_the_error_shows_the_neighbours_around_the_bad_action():
    text = """
        F0.0 SA0.0 F0.1 SA0.1 F0.2 SA0.2 B0.0 B0.1 B0.2 U
        RA1.0 F1.0 SA1.0 B1.0 RA1.1 F1.1 SA1.1 F1.2 B1.1 RA1.2 B1.2 SA1.2 U
        RA2.0 F2.0 SA2.0 B2.0 RA2.1 F2.1 SA2.1 B2.1 RA2.2 F2.2 SA2.2 B2.2 U
        RA3.0 F3.0 B3.0 RA3.1 F3.1 B3.1 RA3.2 F3.2 B3.2 U
    """
    schedule = parse_schedule("\n".join(line.strip() for line in text.strip().splitlines()))
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, lay_out(sliding(4, 1), [1] * 4))
    assert str(caught.value).splitlines() == [
        "rank 1, action 7 (F1.2): its input activation is not there",
        "  rank 0: ... SA0.0 F0.1 SA0.1 F0.2 SA0.2 B0.0 B0.1 B0.2 U",
        "  rank 1: ... F1.0 SA1.0 B1.0 RA1.1 F1.1 SA1.1 >>F1.2<< B1.1 RA1.2 B1.2 SA1.2 U",
        "  rank 2: ... F2.0 SA2.0 B2.0 RA2.1 F2.1 SA2.1 B2.1 RA2.2 F2.2 SA2.2 B2.2 U",
    ]


def test_the_cap_is_checked():
    layout = lay_out(backprop(4), [1] * 4)
    schedule = build_schedule(layout, 6)
    validate(schedule, layout, cap=4)
    with pytest.raises(ScheduleError, match=r"rank 0, .* holds 4 micro-batches, more than the cap of 3"):
        validate(schedule, layout, cap=3)


def test_a_schedule_of_another_number_of_ranks_is_refused():
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks but the layout 3"):
        validate(build_schedule(lay_out(backprop(2), [1, 1]), 1), lay_out(backprop(3), [1, 1, 1]))
