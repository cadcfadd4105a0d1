"""Prices: by hand on small schedules, and in steady state."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_dist.schedule import Costs, build_schedule, draw_timeline, lay_out, parse_schedule, simulate
from mpc_dist.windows import backprop, sliding, tumbling
from tests.schedule.layouts import layouts


def test_a_two_stage_step_is_priced_by_hand():
    layout = lay_out(backprop(2), [1, 1])
    costs = Costs((2.0, 3.0), (2.0, 3.0), (2.0, 3.0), latency=0.5, update=0.25)
    price = simulate(build_schedule(layout, 1), layout, costs)
    # F0 2, hop 0.5, F1 3, B1 6, hop 0.5, B0 4, update 0.25
    assert price.step_time == pytest.approx(16.25)
    assert price.bubble == pytest.approx((1 - 6.25 / 16.25, 1 - 9.25 / 16.25))
    assert price.num_messages == 2
    assert price.in_flight == (1, 1)


def test_messages_of_one_channel_queue_for_its_bandwidth():
    layout = lay_out(sliding(2, 1), [1, 1])
    slow = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), bandwidth=2.0, message_bytes=(10.0, 0.0))
    assert simulate(build_schedule(layout, 4), layout, slow).step_time == pytest.approx(4 * 5.0)


def test_an_adjoint_has_the_size_of_the_activation_that_it_answers():
    layout = lay_out(backprop(3), [1] * 3)
    costs = Costs.uniform([1.0] * 3)
    sized = Costs(costs.forward, costs.input_grad, costs.weight_grad, bandwidth=1.0, message_bytes=(2.0, 3.0, 99.0))
    schedule = build_schedule(layout, 1)
    extra = simulate(schedule, layout, sized).step_time - simulate(schedule, layout, costs).step_time
    assert extra == pytest.approx(2 * (2 + 3))


def test_bytes_are_held_from_forward_to_the_last_adjoint():
    layout = lay_out(backprop(2), [1, 1])
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), held_bytes=(5.0, 7.0))
    price = simulate(build_schedule(layout, 3), layout, costs)
    assert price.in_flight == (2, 1)
    assert price.peak_bytes == (10.0, 7.0)


def test_the_slowest_stage_sets_the_pace_wherever_it_is():
    for slow in range(6):
        costs = Costs.uniform([3.0 if stage == slow else 1.0 for stage in range(6)])
        layout = lay_out(sliding(6, 1), [1] * 6)
        assert simulate(build_schedule(layout, 4, costs=costs), layout, costs).step_time == pytest.approx(4 * 9)


def test_step_time_of_a_horizon_does_not_grow_with_the_number_of_stages():
    def time(K: int) -> float:
        layout = lay_out(sliding(K, 2), [1] * K)
        return simulate(build_schedule(layout, 8, split=True), layout, Costs.uniform([1.0] * K)).step_time

    assert {time(K) for K in (4, 8, 32, 128)} == {32.0}


@given(layouts(), st.integers(1, 4), st.booleans(), st.floats(0, 2))
def test_no_step_is_faster_than_its_busiest_rank(layout, num_microbatches, split, latency):
    costs = Costs.uniform([float(len(blocks)) for blocks in layout.blocks], latency=latency)
    schedule = build_schedule(layout, num_microbatches, split=split, costs=costs)
    price = simulate(schedule, layout, costs)
    busy = [sum(costs.of(action) for action in program) for program in schedule.programs]
    assert price.step_time >= max(busy) - 1e-9
    assert all(0 <= share < 1 for share in price.bubble)
    for row in price.timeline:
        assert all(first.end <= second.start + 1e-9 for first, second in itertools.pairwise(row))


def test_a_deadlock_is_said_not_waited_for():
    layout = lay_out(backprop(2), [1, 1])
    schedule = parse_schedule("F0.0 RD0.0@2 SA0.0 B0.0 U\nRA1.0 F1.0 B1.0 SD1.0@2 U")
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 at RD0\.0@2, rank 1 at RA1\.0"):
        simulate(schedule, layout, Costs.uniform([1.0, 1.0]))


@pytest.mark.slow
def test_1024_stages_and_64_micro_batches_can_be_priced():
    layout = lay_out(sliding(1024, 2), [1] * 1024)
    price = simulate(build_schedule(layout, 64, split=True), layout, Costs.uniform([1.0] * 1024))
    assert price.step_time == 4 * 64


def test_the_drawing_shows_waiting_and_is_cut_at_the_width():
    layout, costs = lay_out(tumbling(4, 2), [1] * 4), Costs.uniform([1.0] * 4)
    drawn = draw_timeline(simulate(build_schedule(layout, 2), layout, costs).timeline, unit=1.0, max_columns=18)
    assert drawn.splitlines()[0].endswith("…")
    assert "·" in drawn


def test_the_drawing_of_a_step_with_its_waiting_and_with_what_is_shorter_than_a_cell():
    layout = lay_out(backprop(2), [1, 1])
    costs = Costs((1.0, 2.0), (1.0, 0.1), (1.0, 0.1), update=3.0)
    drawn = draw_timeline(simulate(build_schedule(layout, 2), layout, costs, num_steps=1).timeline, unit=1.0)
    assert drawn == DRAWN.strip("\n")


DRAWN = """
   0 F0 F1  · B0 ── B1 ──
   1  · F0 ── F1 ──
"""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"forward": (1.0, -1.0)}, "costs.forward"),
        ({"input_grad": (1.0,)}, "costs.input_grad has 1 entries for 2 segments; give one each"),
        ({"held_bytes": (1.0,)}, "costs.held_bytes has 1 entries for 2 segments; give one each"),
        ({"message_bytes": (1.0, -2.0)}, "costs.message_bytes"),
        ({"latency": -0.1}, "costs.latency"),
        ({"update": -0.1}, "costs.update"),
        ({"bandwidth": 0.0}, "costs.bandwidth 0.0 must be positive; use inf for a free link"),
    ],
)
def test_impossible_costs_are_refused(values, message):
    given = {"forward": (1.0, 1.0), "input_grad": (1.0, 1.0), "weight_grad": (1.0, 1.0)}
    Costs(**given, latency=0.0, update=0.0, held_bytes=(0.0, 0.0))
    with pytest.raises(ValueError, match=message):
        Costs(**{**given, **values})
