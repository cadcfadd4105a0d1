"""Scales and curves of the page's charts."""

import pytest

from mpc_dist.report.svg import fit_scale, thin


def test_thinned_curves_keep_their_spikes_and_ends():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[1234], points[7777] = (1234.0, 9.0), (7777.0, -9.0)
    kept = thin(points, 100)
    assert len(kept) <= 102
    assert {points[0], points[1234], points[7777], points[-1]} <= set(kept)
    assert thin(points[:50], 100) == points[:50]


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ([0.0, 200.0], {}, ("0", "50", "100", "150", "200")),
        ([2.2, 5.6], {}, ("2", "3", "4", "5", "6")),
        ([0.01, 10.0], {"may_log": True}, ("0.01", "0.03", "0.1", "0.3", "1", "3", "10")),
        ([3.0, 3.0], {"from_zero": True}, ("0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0")),
        ([float("nan"), float("inf")], {}, ("0.0", "0.2", "0.4", "0.6", "0.8", "1.0")),
    ],
)
def test_ticks_are_round_and_have_no_needless_decimals(values, options, labels):
    scale = fit_scale(values, start=0, end=100, **options)
    assert scale.labels == labels
    assert all(0 <= scale(tick) <= 100 for tick in scale.ticks)


def test_values_that_hardly_differ_are_not_stretched_over_the_scale():
    narrow, wide = (
        fit_scale([30.49, 30.53], start=0, end=100),
        fit_scale([30.49, 30.53], start=0, end=100, least_span=4),
    )
    assert narrow(30.53) - narrow(30.49) > 60
    assert wide(30.53) - wide(30.49) < 2
