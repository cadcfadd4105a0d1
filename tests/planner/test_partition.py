"""The partition is the best there is, by brute force."""

import dataclasses
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
    blocks, readouts = (
        tuple(dataclasses.replace(part, optimizer_bytes=2 * part.parameter_bytes) for part in parts)
        for parts in (blocks, readouts)
    )
    return Measurements(2, blocks, readouts, 0.01, "made up")


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


def partition_densely(num_blocks: int, num_stages: int, pricer: StagePricer) -> tuple[int, ...] | None:
    """Of equals the first cut, looking at every stage that there could be."""
    starts, ends = np.meshgrid(np.arange(num_blocks + 1), np.arange(num_blocks + 1), indexing="ij")
    best = np.where(np.arange(num_blocks + 1) == 0, 0.0, np.inf)
    cuts = []
    for stage in range(num_stages):
        worst = np.where(starts < ends, np.maximum(best[:, None], pricer(stage, starts, ends)), np.inf)
        cuts.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if np.isinf(best[-1]):
        return None
    places = [num_blocks]
    for cut in reversed(cuts):
        places.append(int(cut[places[-1]]))
    return tuple(b - a for a, b in itertools.pairwise(reversed(places)))


@pytest.mark.parametrize("seed", range(40))
def test_narrow_stages_are_enough(seed):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(1, 30))
    K = int(rng.integers(1, T + 1))
    # Equal blocks have many best partitions; one large block makes others wide.
    forwards = [1.0] * T if seed % 3 == 0 else list(rng.uniform(0.1, 5, T))
    forwards[int(rng.integers(T))] *= 1 + 30 * (seed % 2)
    windows = UnitWindows(tumbling(K, min(2, K)), True) if seed % 4 < 2 else UnitWindows(sliding(T, min(3, T)), False)
    limit = [np.inf, 60.0, 200.0][int(rng.integers(3))]
    pricer = StagePricer(measured(forwards, seed=seed), windows, 3, (2,) * K, memory_limit=limit)
    assert partition_blocks(T, K, pricer) == partition_densely(T, K, pricer)


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
