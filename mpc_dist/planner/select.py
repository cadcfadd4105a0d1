"""Algorithm 1 of the paper: from a few measured horizons to h*.

Measure M(h) and cos(theta_h) on a small subset H of horizons; fit M by a line and cos by a cubic; r^(h) = cos^2; take
the h that minimises an objective of (r^, C(M^)) over all h, by brute force. Where a fit misses a measured point, it is
bent through it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpc_dist.planner.cost import CostFunction
from mpc_dist.planner.objective import Choice, Objective, find_best
from mpc_dist.validation import check_whole

MOST_HORIZONS = 6
SPREAD_HORIZONS = 5
"""Of these, how many are chosen before anything is known."""
GOOD_FIT = 0.99
"""R^2 below which a fit is called poor."""
LARGE_RESIDUAL = 0.02
"""And so is a fit of cos that misses a measured point by more than this."""


def choose_horizons(num_blocks: int, most: int = MOST_HORIZONS) -> tuple[int, ...]:
    """The ends 1 and T, and between them points as at Chebyshev's: denser towards the ends, where the curve bends."""
    check_whole("number of blocks:", num_blocks, minimum=1)
    check_whole("number of measured horizons:", most, minimum=2)
    if num_blocks <= most:
        return tuple(range(1, num_blocks + 1))
    angles = [math.pi * i / (most - 1) for i in range(most)]
    return tuple(sorted({round(1 + (num_blocks - 1) * (1 - math.cos(angle)) / 2) for angle in angles}))


@dataclass(frozen=True)
class Fit:
    """A polynomial through measured points by least squares."""

    coefficients: tuple[float, ...]
    """From the highest power, of a variable that is -1 at the first point and 1 at the last."""
    first: float
    last: float
    r_squared: float
    worst_residual: float
    """The largest distance of a measured point."""

    def at(self, horizons: Sequence[int]) -> NDArray[np.float64]:
        """The fitted values."""
        return np.asarray(np.polyval(self.coefficients, _scale(horizons, self.first, self.last)), dtype=np.float64)


def fit_polynomial(points: Mapping[int, float], degree: int) -> Fit:
    """The least-squares polynomial; of a lower degree if there are too few points."""
    if not points:
        raise ValueError("there is nothing to fit: the profile is empty")
    horizons, values = list(points), np.array(list(points.values()), dtype=float)
    if not np.isfinite(values).all():
        bad = [h for h, value in points.items() if not math.isfinite(value)]
        raise ValueError(f"the profile has no finite value at horizons {bad}; measure it again")
    first, last = min(horizons), max(horizons)
    x = _scale(horizons, first, last)
    coefficients = np.polyfit(x, values, min(degree, len(points) - 1))
    residuals = values - np.polyval(coefficients, x)
    total = float(np.sum((values - values.mean()) ** 2))
    # Equal values are fitted perfectly; rounding alone must not look like a poor fit.
    r_squared = 1.0 - float(np.sum(residuals**2)) / total if total > 1e-24 * float(np.sum(values**2)) else 1.0
    return Fit(tuple(coefficients), first, last, r_squared, float(np.abs(residuals).max()))


def _scale(horizons: Sequence[int], first: float, last: float) -> NDArray[np.float64]:
    width = (last - first) or 1.0
    return (2 * np.asarray(horizons, dtype=float) - first - last) / width


@dataclass(frozen=True)
class Selection:
    """What Algorithm 1 found."""

    horizon: int
    """h*."""
    measured: tuple[int, ...]
    """H."""
    memory_fit: Fit
    cosine_fit: Fit
    choices: tuple[Choice, ...]
    """What was estimated for h = 1..T."""
    values: tuple[float, ...]
    """The objective at h = 1..T."""
    warnings: tuple[str, ...]
    """What makes the estimate doubtful."""

    @property
    def choice(self) -> Choice:
        """The estimate at h*."""
        return self.choices[self.horizon - 1]


def select_horizon(
    num_blocks: int,
    memory: Mapping[int, float],
    cosines: Mapping[int, float],
    *,
    cost: CostFunction,
    objective: Objective,
    step_seconds: Mapping[int, float] | None = None,
) -> Selection:
    """h* by Algorithm 1. With every horizon measured, what was measured is used and nothing is fitted.

    `step_seconds` of every horizon is for objectives that look at time.
    """
    if set(memory) != set(cosines):
        raise ValueError(
            f"memory is given at horizons {sorted(memory)} but cosines at {sorted(cosines)}; give the same"
        )
    every = range(1, num_blocks + 1)
    if not set(memory) <= set(every):
        raise ValueError(f"horizons {sorted(set(memory) - set(every))} are outside 1..{num_blocks}")
    memory_fit, cosine_fit = fit_polynomial(memory, 1), fit_polynomial(cosines, 3)
    is_exact = set(memory) == set(every)
    bytes_held = np.maximum(_estimate(memory_fit, memory, every), 0.0)
    fitted = _estimate(cosine_fit, cosines, every)
    qualities = np.clip(fitted, 0.0, 1.0) ** 2
    choices = tuple(
        Choice(
            float(h),
            float(quality),
            float(size),
            cost(float(size)),
            step_seconds=math.nan if step_seconds is None else step_seconds[h],
        )
        for h, quality, size in zip(every, qualities, bytes_held, strict=True)
    )
    best = find_best(choices, objective)
    warnings = () if is_exact else _doubts(memory_fit, cosine_fit, fitted)
    values = tuple(objective(choice) for choice in choices)
    return Selection(best + 1, tuple(sorted(memory)), memory_fit, cosine_fit, choices, values, warnings)


def refine_horizon(
    num_blocks: int,
    measure: Callable[[int], tuple[float, float]],
    *,
    cost: CostFunction,
    objective: Objective,
    step_seconds: Mapping[int, float] | None = None,
    exact: bool = False,
) -> tuple[Selection, dict[int, float], dict[int, float]]:
    """Algorithm 1 with its horizons chosen as it goes: a few spread out, then the h* that it finds and its neighbours.

    `measure(h)` gives M(h) and cos(theta_h); at most six are measured, or all if `exact`. Also returns what it gave.
    """
    memory: dict[int, float] = {}
    cosines: dict[int, float] = {}
    wanted = list(range(1, num_blocks + 1) if exact else choose_horizons(num_blocks, SPREAD_HORIZONS))
    while True:
        for horizon in wanted:
            memory[horizon], cosines[horizon] = measure(horizon)
        ordered = sorted(memory)
        selection = select_horizon(
            num_blocks,
            {h: memory[h] for h in ordered},
            {h: cosines[h] for h in ordered},
            cost=cost,
            objective=objective,
            step_seconds=step_seconds,
        )
        # The answer itself first; if it stands, its neighbours: the one below costs less.
        near = (selection.horizon, selection.horizon - 1, selection.horizon + 1)
        wanted = [h for h in near if 1 <= h <= num_blocks and h not in memory][:1]
        if not wanted or len(memory) >= MOST_HORIZONS:
            return selection, {h: memory[h] for h in ordered}, {h: cosines[h] for h in ordered}


def _estimate(fit: Fit, points: Mapping[int, float], every: Sequence[int]) -> NDArray[np.float64]:
    """The fit, bent so that it passes through what was measured."""
    known = sorted(points)
    residuals = np.array([points[h] for h in known]) - fit.at(known)
    return fit.at(every) + np.interp(every, known, residuals)


def _doubts(memory_fit: Fit, cosine_fit: Fit, fitted: NDArray[np.float64]) -> tuple[str, ...]:
    doubts = []
    for name, fit in (("memory's line", memory_fit), ("the cosine's cubic", cosine_fit)):
        if fit.r_squared < GOOD_FIT:
            doubts.append(f"{name} fits poorly: R^2 = {fit.r_squared:.4f}; measure every horizon with --exact")
    if cosine_fit.worst_residual > LARGE_RESIDUAL:
        doubts.append(f"the cosine's cubic misses a measured point by {cosine_fit.worst_residual:.3f}")
    outside = int(np.sum((fitted < -1e-9) | (fitted > 1 + 1e-9)))
    if outside:
        doubts.append(f"the cosine's cubic leaves [0, 1] at {outside} horizons and was clamped")
    return tuple(doubts)
