"""Built schedules: the pictures, the step times that the theory gives, and what they hold in flight."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpc_dist.schedule import Costs, Layout, build_schedule, draw_timeline, lay_out, simulate, validate
from mpc_dist.schedule.communication import add_communication, remove_communication
from mpc_dist.windows import Windows, backprop, sliding, tumbling
from tests.schedule.layouts import layouts


def one_block_per_rank(windows: Windows) -> tuple[Layout, Costs]:
    K = windows.num_blocks
    return lay_out(windows, [1] * K), Costs.uniform([1.0] * K)


def step_time(windows: Windows, M: int, *, split: bool, latency: float = 0.0) -> float:
    layout, _ = one_block_per_rank(windows)
    costs = Costs.uniform([1.0] * windows.num_blocks, latency=latency)
    return simulate(build_schedule(layout, M, split=split, costs=costs), layout, costs).step_time


def picture(windows: Windows, M: int, *, split: bool) -> list[str]:
    layout, costs = one_block_per_rank(windows)
    schedule = build_schedule(layout, M, split=split)
    return draw_timeline(simulate(schedule, layout, costs, num_steps=2).timeline, unit=1.0).splitlines()


def test_full_horizon_without_halves_is_1F1B():
    layout, _ = one_block_per_rank(backprop(4))
    assert str(remove_communication(build_schedule(layout, 5))) == "\n".join(
        [
            "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4 U",
            "F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 B1.3 B1.4 U",
            "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 B2.4 U",
            "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 U",
        ]
    )


def test_horizon_one_needs_no_message_back():
    layout, _ = one_block_per_rank(sliding(3, 1))
    assert str(build_schedule(layout, 2)) == "\n".join(
        [
            "F0.0 SA0.0 B0.0 F0.1 SA0.1 B0.1 U",
            "RA1.0 F1.0 SA1.0 B1.0 RA1.1 F1.1 SA1.1 B1.1 U",
            "RA2.0 F2.0 B2.0 RA2.1 F2.1 B2.1 U",
        ]
    )


def test_horizon_two_relays_to_the_neighbour_below_and_has_no_bubble():
    assert picture(sliding(4, 2), 2, split=True) == [
        "   0 F0 F1  ·  · B0 ── B1 ──",
        "   1  ·  · F0 R0 F1 R1 I0 I1 W0 W1",
        "   2  ·  ·  · F0 R0 F1 R1 I0 I1 W0 W1",
        "   3  ·  ·  ·  · F0 I0 F1 I1 W0 W1",
    ]


def test_weight_halves_fill_the_bubbles_of_backprop():
    assert picture(backprop(4), 4, split=True) == [
        "   0 F0 F1 F2 F3  ·  ·  · B0 ── B1 ── B2 ── B3 ──",
        "   1  · F0 F1 F2 F3  · I0 W0 I1 W1 I2 W2 I3 W3",
        "   2  ·  · F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3",
        "   3  ·  ·  · F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3",
    ]


@pytest.mark.parametrize("K", [8, 16, 64])
@pytest.mark.parametrize("h", [1, 2, 3, 4])
def test_split_horizons_take_h_plus_2_per_micro_batch_at_any_number_of_stages(K, h):
    assert step_time(sliding(K, h), 1, split=True) == 2 * h + 1
    for M in (4, 8):
        assert step_time(sliding(K, h), M, split=True) == (h + 2) * M


@pytest.mark.parametrize(("g", "M", "time"), [(2, 1, 5), (2, 4, 13), (2, 8, 25), (4, 1, 9), (4, 4, 15), (4, 8, 27)])
def test_tumbling_windows_take_3M_plus_g_minus_1(g, M, time):
    assert step_time(tumbling(8, g), M, split=True) == time
    assert step_time(tumbling(16, g), M, split=True) == time


@pytest.mark.parametrize(("M", "time"), [(1, 17), (2, 19), (4, 23), (8, 31)])
def test_split_backprop_has_the_zero_bubble_time(M, time):
    assert step_time(backprop(8), M, split=True) == time


@pytest.mark.parametrize("M", [1, 2, 4, 8, 16])
def test_whole_backprop_has_the_time_of_1F1B(M):
    assert step_time(backprop(8), M, split=False) == 3 * (M + 8 - 1)


@pytest.mark.parametrize(("h", "most"), [(1, 1), (2, 3), (3, 4), (4, 5)])
@pytest.mark.parametrize("split", [False, True])
def test_in_flight_micro_batches_are_bounded_by_the_horizon(h, most, split):
    layout, costs = one_block_per_rank(sliding(8, h))
    schedule = build_schedule(layout, 12, split=split)
    validate(schedule, layout, cap=most)
    assert max(simulate(schedule, layout, costs).in_flight) <= most


def test_1F1B_holds_one_micro_batch_less_on_each_further_rank():
    layout, costs = one_block_per_rank(backprop(8))
    assert simulate(build_schedule(layout, 12), layout, costs).in_flight == (8, 7, 6, 5, 4, 3, 2, 1)


@given(layouts(), st.integers(1, 5), st.booleans())
@settings(max_examples=200)
def test_every_layout_gets_a_valid_schedule(layout, num_microbatches, split):
    schedule = build_schedule(layout, num_microbatches, split=split)
    validate(schedule, layout, cap=layout.span + 1)
    costs = Costs.uniform([1.0] * layout.num_segments)
    assert max(simulate(schedule, layout, costs).in_flight) <= layout.span + 1


@given(layouts(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_a_given_cap_is_kept(layout, num_microbatches, cap, split):
    schedule = build_schedule(layout, num_microbatches, split=split, cap=cap)
    validate(schedule, layout, cap=cap)
    assert max(simulate(schedule, layout, Costs.uniform([1.0] * layout.num_segments)).in_flight) <= cap


@given(layouts(), st.integers(1, 4), st.booleans(), st.floats(0, 3))
def test_the_order_may_follow_any_costs_and_stays_valid(layout, num_microbatches, split, latency):
    costs = Costs.uniform([1 + (s * 7 % 3) for s in range(layout.num_segments)], latency=latency)
    schedule = build_schedule(layout, num_microbatches, split=split, costs=costs)
    validate(schedule, layout)
    assert build_schedule(layout, num_microbatches, split=split, costs=costs) == schedule


@given(layouts(), st.integers(1, 4), st.booleans())
def test_communication_is_a_pass_over_the_compute_actions(layout, num_microbatches, split):
    schedule = build_schedule(layout, num_microbatches, split=split)
    assert add_communication(remove_communication(schedule), layout) == schedule


def test_bad_arguments_are_refused():
    layout, _ = one_block_per_rank(backprop(3))
    with pytest.raises(ValueError, match="number of micro-batches: 0 is out of range"):
        build_schedule(layout, 0)
    with pytest.raises(ValueError, match="in-flight cap 0 is out of range"):
        build_schedule(layout, 2, cap=0)
    with pytest.raises(ValueError, match=r"costs\.input_grad has 1 entries for 2 segments"):
        Costs((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ValueError, match=r"costs\.forward -1\.0 is out of range"):
        Costs.uniform([-1.0])
    with pytest.raises(ValueError, match=r"costs\.bandwidth 0 must be positive"):
        Costs((1.0,), (1.0,), (1.0,), bandwidth=0)
