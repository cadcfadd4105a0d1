"""Schedules print and parse as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_dist.schedule import Action, Op, build_schedule, lay_out, parse_action, parse_schedule
from mpc_dist.windows import sliding
from tests.schedule.layouts import layouts


def test_actions_print_as_documented():
    texts = "F3.0 R3.0@5 B3.0 I3.0 W3.0 SA3.0 RA3.0 SD3.0@5 RD3.0@5 U"
    assert " ".join(str(parse_action(text)) for text in texts.split()) == texts
    assert parse_action("R12.34@56") == Action(Op.RELAY, 12, 34, 56)


@given(layouts(), st.integers(1, 4), st.booleans())
def test_a_schedule_parses_back_from_what_it_prints(layout, num_microbatches, split):
    schedule = build_schedule(layout, num_microbatches, split=split)
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["", "X1.0", "F1", "F1.0@2", "R1.0", "F-1.0", "U1.0", "F1.0 "])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="is no action; write"):
        parse_action(text)


def test_a_schedule_knows_whether_its_backwards_are_in_halves():
    layout = lay_out(sliding(4, 2), [1] * 4)
    assert build_schedule(layout, 2, split=True).is_split
    assert not build_schedule(layout, 2).is_split
