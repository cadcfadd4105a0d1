"""The protection benchmark compares the same steps with and without."""

import pytest

from mpc_dist.bench.protection import ProtectionSetting, bench_protection


def test_a_row_for_each_system_and_ratios_to_the_first():
    rows = bench_protection(ProtectionSetting(2, 2, seconds=0.005, num_steps=2, repeats=2))
    assert [row.system for row in rows] == ["unprotected", "protected", "protected, skipping together"]
    assert rows[0].extra["ratio of medians"] == 1.0
    for row in rows[1:]:
        assert row.extra["ratio of medians"] > 0.5
    with pytest.raises(ValueError, match="--ranks"):
        ProtectionSetting(1, 2, seconds=0.005, num_steps=2, repeats=2)
