"""The partition is the best there is, by brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpc_dist.planner.measurements import BlockCosts, Measurements, ReadoutCosts
from mpc_dist.planner.partition import StagePricer, UnitWindows, parse_partition, partition_blocks
from mpc_dist.schedule import lay_out
from mpc_dist.schedule.action import COMPUTE
from mpc_dist.schedule.builder import build_schedule
from mpc_dist.windows import backprop, cumulative, expand, sliding, tumbling


def measured(forwards: list[float], *, seed: int = 0) -> Measurements:
    rng = np.random.default_rng(seed)
    blocks = tuple(
        BlockCosts(f, *rng.uniform(0.5, 2, 2), *rng.uniform(1, 9, 3), *rng.uniform(1, 5, 2)) for f in forwards
    )
    readouts = tuple(ReadoutCosts(*rng.uniform(0.1, 1, 4)) for _ in forwards)
    return Measurements(2, blocks, readouts, 0.01, 2.0, "made up")


def all_partitions(num_blocks: int, num_stages: int):
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        ends = (0, *cuts, num_blocks)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@given(
    forwards=st.lists(st.floats(0.1, 5), min_size=1, max_size=7),
    K=st.integers(1, 4),
    kind=st.sampled_from(["backprop", "sliding", "tumbling", "cumulative"]),
    over_stages=st.booleans(),
    limit=st.sampled_from([np.inf, 60.0, 90.0]),
    seed=st.integers(0, 3),
)
def test_it_equals_brute_force(forwards, K, kind, over_stages, limit, seed):
    T = len(forwards)
    K = min(K, T)
    units = K if over_stages else T
    windows = {"sliding": sliding, "tumbling": tumbling, "cumulative": cumulative}.get(kind, lambda n, _: backprop(n))(
        units, min(2, units)
    )
    found = measured(forwards, seed=seed)
    pricer = StagePricer(
        found, UnitWindows(windows, over_stages), 3, tuple(min(3, K - k) for k in range(K)), memory_limit=limit
    )

    def worst(sizes: tuple[int, ...]) -> float:
        ends = np.cumsum([0, *sizes])
        return max(pricer(k, ends[k], ends[k + 1]) for k in range(K))

    best = min(worst(sizes) for sizes in all_partitions(T, K))
    sizes = partition_blocks(T, K, pricer)
    if sizes is None:
        assert np.isinf(best)
    else:
        assert worst(sizes) == pytest.approx(best)


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    kind=st.sampled_from(["backprop", "sliding", "tumbling", "cumulative"]),
    over_stages=st.booleans(),
    M=st.integers(1, 3),
)
def test_a_stages_price_is_what_its_program_costs(sizes, kind, over_stages, M):
    T, K = sum(sizes), len(sizes)
    units = K if over_stages else T
    windows = {"sliding": sliding, "tumbling": tumbling, "cumulative": cumulative}.get(kind, lambda n, _: backprop(n))(
        units, min(2, units)
    )
    found = measured([1.0 + t for t in range(T)])
    layout = lay_out(expand(windows, sizes) if over_stages else windows, sizes)
    costs = found.segment_costs(layout)
    schedule = build_schedule(layout, M, costs=costs)
    pricer = StagePricer(found, UnitWindows(windows, over_stages), M, (1,) * K)
    ends = np.cumsum([0, *sizes])
    for rank, program in enumerate(schedule.programs):
        spent = sum(costs.of(action) for action in program if action.op in COMPUTE)
        # The first segment's input needs no gradient; the table prices every block alike, so block 0 costs none.
        update = found.update_seconds(layout.stage_blocks(rank))
        assert pricer(rank, ends[rank], ends[rank + 1]) == pytest.approx(spent + update)


def test_a_thousand_blocks_onto_64_stages():
    found = measured(list(np.random.default_rng(0).uniform(1, 2, 1000)))
    pricer = StagePricer(found, UnitWindows(sliding(64, 2), True), 8, (3,) * 64)
    sizes = partition_blocks(1000, 64, pricer)
    assert sizes is not None
    assert (sum(sizes), len(sizes)) == (1000, 64)


def test_layouts_by_hand():
    assert parse_partition("4|4|6|2", 16) == (4, 4, 6, 2)
    for text in ("4|4", "4|x|8", "16|0", "", "4,4,8"):
        with pytest.raises(ValueError, match="must be stage sizes such as 4"):
            parse_partition(text, 16)
    with pytest.raises(ValueError, match="3 blocks cannot fill 4 stages"):
        partition_blocks(3, 4, StagePricer(measured([1.0] * 3), UnitWindows(backprop(3), False), 1, (1,) * 4))
