"""The order of a power law: how fast a quantity vanishes as the horizon nears T."""

import math
from collections.abc import Sequence

import numpy as np

NOISE_FLOOR = 1e-11
"""Of 1 - cos, below which nothing is fitted: float32 gradients with float64 inner products are good to about 1e-14."""
FEWEST_POINTS = 3


def fit_order(distances: Sequence[float], values: Sequence[float], *, floor: float = NOISE_FLOOR) -> float:
    """The slope of log(value) against log(distance) over the values above the floor; NaN of fewer than three."""
    points = [(d, v) for d, v in zip(distances, values, strict=True) if d > 0 and v > floor]
    if len(points) < FEWEST_POINTS:
        return math.nan
    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def order_near_end(gaps: Sequence[float], *, share: float = 1 / 3) -> float:
    """The order of gaps[h - 1], h = 1..T, in T - h, over the last share of the horizons before T itself."""
    num_blocks = len(gaps)
    nearest = range(1, max(FEWEST_POINTS, round(share * num_blocks)) + 1)
    distances = [d for d in nearest if d < num_blocks]
    return fit_order(distances, [gaps[num_blocks - d - 1] for d in distances])
