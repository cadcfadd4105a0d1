"""The protection benchmark compares the same steps with and without."""

import math
import random

import pytest

from mpc_dist.bench.alternate import AlternatingSetting, bound_median, take_turns
from mpc_dist.bench.protection import bench_protection


def test_a_row_for_each_system_and_ratios_to_the_first():
    rows = bench_protection(AlternatingSetting(2, 2, seconds=0.005, num_steps=2, repeats=6))
    assert [row.system for row in rows] == ["unprotected", "protected", "protected, skipping together"]
    assert set(rows[0].extra.values()) == {1.0}
    for row in rows[1:]:
        assert row.extra["95 % from"] <= row.extra["median of the rounds' ratios"] <= row.extra["to"]
        assert row.extra["ratio of medians"] > 0.5
    with pytest.raises(ValueError, match="--ranks"):
        AlternatingSetting(1, 2, seconds=0.005, num_steps=2, repeats=2)


def test_systems_take_turns_and_who_comes_first_alternates():
    assert list(take_turns("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    assert bound_median([1.0] * 5) is None
    assert bound_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    drawn = random.Random(0)
    bounds = [bound_median([drawn.expovariate(1.0) for _ in range(24)]) for _ in range(2000)]
    true = math.log(2)
    held = sum(low <= true <= high for low, high in bounds)  # type: ignore[misc]
    # By the binomial distribution 97.7 % with 24 values; a hundredth is three times the error of 2,000 draws.
    assert 0.967 < held / 2000 < 0.987
