"""Window maps: what each constructor says, what follows from a map, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_dist.windows import (
    Windows,
    backprop,
    cumulative,
    expand,
    forward_forward,
    group,
    loco,
    shrink,
    sliding,
    tumbling,
)


def boundaries(windows: Windows) -> list[tuple[int, ...]]:
    return [tuple(s for s, _ in aims) for aims in windows.targets]


@st.composite
def window_maps(draw: st.DrawFn) -> Windows:
    """Any map: every block aims at some of the boundaries ahead of it."""
    T = draw(st.integers(1, 9))
    weights = st.floats(0.1, 3.0)
    targets = []
    for t in range(T):
        ahead = draw(st.sets(st.integers(t + 1, T), min_size=1))
        targets.append(tuple((s, draw(weights)) for s in sorted(ahead)))
    return Windows(tuple(targets))


def test_sliding_aims_h_ahead_and_never_past_the_end():
    assert boundaries(sliding(5, 3)) == [(3,), (4,), (5,), (5,), (5,)]
    assert sliding(5, 3).readouts == (3, 4, 5)


def test_horizon_one_is_forward_forward_and_horizon_T_is_backprop():
    assert boundaries(forward_forward(4)) == [(1,), (2,), (3,), (4,)]
    assert boundaries(backprop(4)) == [(4,)] * 4
    assert sliding(4, 1) == forward_forward(4)
    assert sliding(4, 4) == backprop(4)


def test_anchored_windows_aim_at_the_next_anchor_at_least_h_ahead():
    assert boundaries(sliding(6, 2, anchors=[6, 3])) == [(3,), (3,), (6,), (6,), (6,), (6,)]


def test_tumbling_aims_at_the_end_of_its_group_also_of_a_short_last_one():
    assert boundaries(tumbling(5, 2)) == [(2,), (2,), (4,), (4,), (5,)]
    assert tumbling(5, 5) == backprop(5)


def test_cumulative_weighs_all_losses_ahead_equally():
    assert cumulative(3, 2).targets == (((1, 0.5), (2, 0.5)), ((2, 0.5), (3, 0.5)), ((3, 1.0),))


def test_loco_is_appendix_B():
    assert loco(5).targets == (
        ((2, 1.0),),
        ((2, 1.0), (3, 1.0)),
        ((3, 1.0), (4, 1.0)),
        ((4, 1.0), (5, 1.0)),
        ((5, 1.0),),
    )
    assert loco(2).targets == (((2, 1.0),), ((2, 1.0),))


def test_relays_of_sliding_windows_are_the_h_minus_one_readouts_of_the_blocks_below():
    windows = sliding(6, 3)
    assert [windows.relays(t) for t in range(6)] == [(), (3,), (3, 4), (4, 5), (5,), ()]
    assert windows.stop_of(4) == 1
    assert windows.blocks_crossed_by(4) == range(1, 4)
    assert windows.readouts_crossing(2) == (3, 4, 5)
    assert [windows.last_readout_crossing(t) for t in range(6)] == [3, 4, 5, 6, 6, 6]


def test_tumbling_windows_need_no_relay():
    assert all(not tumbling(9, 4).relays(t) for t in range(9))


@given(window_maps())
def test_every_answer_follows_from_the_targets_by_brute_force(windows: Windows):
    T = windows.num_blocks
    aims = {(t, s): w for t in range(T) for s, w in windows.targets[t]}
    assert windows.readouts == tuple(s for s in range(1, T + 1) if any((t, s) in aims for t in range(T)))
    # A block is crossed by s exactly if it lies below s and some block at or below it aims at s.
    crossed = {(t, s) for s in windows.readouts for t in range(s) if any((b, s) in aims for b in range(t + 1))}
    for s in windows.readouts:
        assert windows.blocks_aiming_at(s) == tuple(t for t in range(T) if (t, s) in aims)
        assert list(windows.blocks_crossed_by(s)) == [t for t in range(T) if (t, s) in crossed]
        assert windows.stop_of(s) == min(t for t in range(T) if (t, s) in crossed)
    for t in range(T):
        crossing = tuple(s for s in windows.readouts if (t, s) in crossed)
        assert windows.readouts_crossing(t) == crossing
        assert windows.relays(t) == tuple(s for s in crossing if (t, s) not in aims)
        assert windows.last_readout_crossing(t) == max(crossing)
        for s in windows.readouts:
            assert windows.is_target(t, s) == ((t, s) in aims)
            assert windows.weight(t, s) == aims.get((t, s), 0.0)


def test_the_drawing_shows_targets_paths_and_unused_readouts():
    assert str(sliding(5, 2)) == "\n".join(
        [
            "5 blocks, readouts at 2, 3, 4, 5",
            " block 1 2 3 4 5   aims at",
            "     0 ──● ○ ○ ○   2",
            "     1   ──● ○ ○   3",
            "     2   ○ ──● ○   4",
            "     3   ○ ○ ──●   5",
            "     4   ○ ○ ○ ●   5",
        ]
    )
    assert cumulative(2, 2).describe() == "\n".join(
        [
            "2 blocks, readouts at 1, 2",
            " block 1 2   aims at",
            "     0 ●─●   1 (x0.5), 2 (x0.5)",
            "     1 ○ ●   2",
        ]
    )


@pytest.mark.parametrize("constructor", [sliding, cumulative])
@pytest.mark.parametrize(
    ("horizon", "message"),
    [
        (0, r"horizon 0 sees no block ahead; use 1\.\.8"),
        (-1, r"horizon -1 sees no block ahead; use 1\.\.8"),
        (9, r"horizon 9 exceeds the 8 blocks of this model; use 1\.\.8"),
        ("two", r"horizon must be a whole number of blocks, got 'two'; use 1\.\.8"),
        (float("nan"), r"horizon must be a whole number of blocks, got nan; use 1\.\.8"),
        (2.5, r"got 2\.5"),
        (True, r"got True"),
        (None, r"got None"),
    ],
)
def test_a_bad_horizon_is_named_with_limit_and_remedy(constructor, horizon, message):
    with pytest.raises(ValueError, match=message):
        constructor(8, horizon)


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        ([2, 9, 8], r"anchor 9 is out of range; use 1\.\.8"),
        ([0, 8], r"anchor 0 is out of range; use 1\.\.8"),
        ([2, 4], r"anchors \[2, 4\] leave out the last boundary, 8, .*; add it"),
        ([], r"leave out the last boundary, 8"),
        (8.0, r"anchor must be a whole number, got 8\.0"),
        (["4", 8], r"anchor must be a whole number, got '4'"),
    ],
)
def test_bad_anchors_are_named_with_limit_and_remedy(anchors, message):
    with pytest.raises(ValueError, match=message):
        sliding(8, 2, anchors=anchors)


def test_whole_numbers_of_numpy_are_whole_numbers():
    assert sliding(np.int64(4), np.int32(2)) == sliding(4, 2)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"window size 9 exceeds the 8 blocks"):
        tumbling(8, 9)
    with pytest.raises(ValueError, match=r"number of blocks: 0 is out of range"):
        sliding(0, 1)
    with pytest.raises(ValueError, match=r"number of blocks for LoCo: 1 is out of range; use 2 or more"):
        loco(1)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ((), "at least 1 block"),
        (((),), "block 0 aims at no readout"),
        ((((2, 1.0),),), r"boundary of block 0: 2 is out of range; use 1\.\.1"),
        ((((1, 1.0),), ((1, 1.0),)), r"boundary of block 1: 1 is out of range; use 2\.\.2"),
        ((((2, 1.0), (1, 1.0)), ((2, 1.0),)), "list each boundary once, ascending"),
        ((((1, 1.0), (1, 1.0)),), "list each boundary once, ascending"),
        ((((1, 0.0),),), "by 0.0; use a positive number"),
        ((((1, float("nan")),),), "by nan; use a positive number"),
        ((((1, "a"),),), "by a; use a positive number"),
    ],
)
def test_an_impossible_map_is_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        Windows(targets)


def test_windows_of_stages_become_windows_of_their_blocks_and_back():
    stages = Windows((((1, 0.5), (2, 0.25)), ((3, 1.0),), ((3, 2.0),)))
    blocks = Windows((((2, 0.5), (3, 0.25)), ((2, 0.5), (3, 0.25)), ((6, 1.0),), *[((6, 2.0),)] * 3))
    assert expand(stages, [2, 1, 3]) == blocks
    assert group(blocks, [2, 1, 3]) == stages


def test_fewer_blocks_stand_for_several_each_with_the_mean_of_their_aims():
    assert shrink(sliding(6, 2), 6) == sliding(6, 2)
    assert shrink(backprop(6), 2) == backprop(2)
    assert shrink(tumbling(12, 4), 3) == forward_forward(3)
    # Blocks 0 to 2 aim at boundaries 2, 3 and 4: two in the first group's part of the chain, one in the second's.
    assert shrink(sliding(6, 2), 2).targets == (
        ((1, pytest.approx(2 / 3)), (2, pytest.approx(1 / 3))),
        ((2, pytest.approx(1.0)),),
    )
    with pytest.raises(ValueError, match="6 blocks cannot shrink to 4; use a divisor"):
        shrink(sliding(6, 2), 4)
