"""`mpc-dist reproduce theory`: the cubic order of deep linear nets, r(h) against cos^2, and the closed form of h*.

What is judged here and how it is drawn: `theory_findings.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpc_dist.study.angle import ALL_RESIDUAL
from mpc_dist.study.cell import Cell, Record
from mpc_dist.study.deep_linear import RELATIONS, DeepLinearCell, Relation
from mpc_dist.study.experiment import Records
from mpc_dist.study.memory import MemoryCell
from mpc_dist.study.order import fit_order
from mpc_dist.study.paper_tasks import LINEAR, MLP, PaperTask
from mpc_dist.study.training_cell import WindowChoice
from mpc_dist.task import Task

NORM = 0.3
WIDTH = 10
NEAREST, FURTHEST = 0.95, 0.7
"""The order is fitted over h/T between these."""
EVALUATIONS = 10
SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)
"""lambda of O2 = -r + lambda C as a share of 3k/(aT), from which on the closed form gives the least horizon."""


@dataclass(frozen=True)
class Size:
    """How much is run."""

    depths: tuple[int, ...]
    num_linear_seeds: int
    tasks: tuple[PaperTask, ...]
    num_seeds: int
    steps: int
    most_horizons: int
    """Trained per task, spread over 1..T."""


FULL = Size((16, 32, 64, 128), 5, (LINEAR, ALL_RESIDUAL, MLP), 3, steps=200, most_horizons=9)
QUICK = Size((16, 32), 3, (LINEAR, ALL_RESIDUAL, MLP), 3, steps=50, most_horizons=4)


def build_cells(quick: bool) -> Mapping[str, Cell]:
    """Deep linear nets at initialisation, short trainings with each horizon, and the memory of the nets trained."""
    return build_from(QUICK if quick else FULL)


def build_from(size: Size) -> dict[str, Cell]:
    """Cells of that size."""
    cells: dict[str, Cell] = {
        f"{relation}, T = {depth}, seed {seed}": DeepLinearCell(depth, relation, NORM, WIDTH, seed)
        for relation in RELATIONS
        for depth in size.depths
        for seed in range(size.num_linear_seeds)
    }
    for task in size.tasks:
        last = task.model.num_blocks
        most = min(size.most_horizons, last)
        horizons = sorted({round(1 + (last - 1) * i / max(1, most - 1)) for i in range(most)})
        for seed in range(size.num_seeds):
            for h in horizons:
                cells[f"{task.title}, h = {h}, seed {seed}"] = task.train(
                    windows=WindowChoice("sliding", h),
                    steps=size.steps,
                    seed=seed,
                    num_evaluations=EVALUATIONS,
                    # Along back-propagation's way, whenever the loss is evaluated.
                    angles_at=tuple(round(size.steps * i / EVALUATIONS) for i in range(EVALUATIONS))
                    if h == last
                    else (),
                )
        cells[f"memory of {task.title}"] = _memory(task)
    return cells


def _memory(task: PaperTask) -> MemoryCell:
    shape = Task("regression", (1,), 4) if task.data == MLP.data else Task("regression", (10,), 10)
    every = tuple(range(1, task.model.num_blocks + 1))
    return MemoryCell(task.model, shape, task.readout.kind, task.batch_size, every)


def deep_linear_order(gaps: Sequence[float]) -> float:
    """The order of 1 - cos^2(theta_h) in 1 - h/T over the horizons near T, from 1 - cos of every horizon."""
    # 1 - cos^2 = (1 - cos)(1 + cos), without the digits that squaring would lose.
    return _order_near_end([gap * (2 - gap) for gap in gaps])


def counted_order(num_blocks: int, *, power: int) -> float:
    """The order that a net of this depth shows if the squared error of a block d layers short of the end is d^power.

    Summed over the T - h blocks that fall short, d^2 (layers that push the same way) is of order 3 and d (layers that
    are independent) of order 2 as T grows; a net of few layers shows less, because a sum is no integral.
    """
    sums = np.cumsum((np.arange(num_blocks) / num_blocks) ** power)  # sums[T - h]: blocks 1..T - h layers short
    return _order_near_end(sums[::-1].tolist())


def _order_near_end(values: Sequence[float]) -> float:
    last = len(values)
    chosen = [h for h in range(1, last + 1) if FURTHEST * last <= h <= NEAREST * last]
    return fit_order([1 - h / last for h in chosen], [values[h - 1] for h in chosen])


def fit_cubic_factor(squares: NDArray[np.float64]) -> float:
    """k of cos^2 = 1 - k (1 - h/T)^3, by least squares over h = 1..T."""
    last = len(squares)
    cubes = (1 - np.arange(1, last + 1) / last) ** 3
    return float(cubes @ (1 - squares) / (cubes @ cubes))


def closed_form_horizon(num_blocks: int, *, factor: float, slope: float, weight: float) -> float:
    """h* = T (1 - sqrt(a lambda T / (3 k))), in 1..T: where O2 = -cos^2 + lambda C is least for C = a h + b.

    d/dh of -1 + k (1 - h/T)^3 + lambda a h is zero where (1 - h/T)^2 = a lambda T / (3 k). The paper prints it without
    the T under the root (section 4).
    """
    return _within(num_blocks, slope * weight * num_blocks / (3 * factor) if factor > 0 else math.inf)


def printed_horizon(num_blocks: int, *, factor: float, slope: float, weight: float) -> float:
    """The form as the paper prints it: h* = T (1 - sqrt(a lambda / (3 k)))."""
    return _within(num_blocks, slope * weight / (3 * factor) if factor > 0 else math.inf)


def _within(num_blocks: int, under_root: float) -> float:
    return min(max(num_blocks * (1 - math.sqrt(under_root)), 1.0), float(num_blocks))


@dataclass(frozen=True)
class Choice:
    """h* of one curve and one lambda, by three ways."""

    curve: str
    num_blocks: int
    factor: float
    """k."""
    weight: float
    """lambda."""
    best: int
    """By brute force over the measured cos^2 and memory."""
    closed: float
    printed: float
    regret: float
    """How much more the objective is at the closed form's h* than at the best, as a share of the objective's range."""

    def error(self, horizon: float) -> float:
        """Distance to the best, as a share of T."""
        return abs(horizon - self.best) / self.num_blocks


def choose(curve: str, squares: NDArray[np.float64], costs: NDArray[np.float64], share: float) -> Choice:
    """h* from cos^2 and C of h = 1..T, for lambda = share * 3k/(aT)."""
    last = len(squares)
    slope = float(np.polyfit(np.arange(1, last + 1), costs, 1)[0])
    factor = fit_cubic_factor(squares)
    weight = share * 3 * factor / (slope * last)
    values = -squares + weight * costs
    best = int(np.argmin(values)) + 1
    closed = closed_form_horizon(last, factor=factor, slope=slope, weight=weight)
    printed = printed_horizon(last, factor=factor, slope=slope, weight=weight)
    reached = float(values[round(closed) - 1])
    width = float(values.max() - values.min())
    regret = (reached - float(values.min())) / width if width else 0.0
    return Choice(curve, last, factor, weight, best, closed, printed, regret)


@dataclass(frozen=True)
class Rates:
    """How fast each horizon trained one task, beside its angle to back-propagation."""

    title: str
    horizons: tuple[int, ...]
    """Trained; the last is T."""
    early: NDArray[np.float64]
    """`early[seed, i]`: r of the horizon after a tenth of the steps; NaN where the loss is no number any more."""
    late: NDArray[np.float64]
    """After all steps."""
    squares: NDArray[np.float64]
    """`squares[seed, moment, h - 1]`: cos^2(theta_h) along back-propagation's way, h = 1..T."""

    def expected(self, *, late: bool) -> NDArray[np.float64]:
        """`[seed, i]`: the mean of cos^2 over the way so far; for the early rate that is its start."""
        moments = self.squares if late else self.squares[:, :1]
        return np.asarray(moments.mean(axis=1)[:, [h - 1 for h in self.horizons]])

    def mean_gap(self, *, late: bool) -> float:
        """The mean of |r - cos^2| over the runs of horizons below T that did not blow up; infinite if all did."""
        gaps = np.abs((self.late if late else self.early) - self.expected(late=late))[:, :-1]
        return float(np.nanmean(gaps)) if np.isfinite(gaps).any() else math.inf

    @property
    def num_lost(self) -> int:
        """How many runs of horizons below T blew up."""
        return int(np.isnan(self.late[:, :-1]).sum())


def relative_rate(loss: float, *, start: float, full: float) -> float:
    """r(h) = ln(J_h / J_0) / ln(J_T / J_0): the share of back-propagation's progress, on a log scale (section 3)."""
    if not (math.isfinite(loss) and loss > 0 and full > 0):
        return math.nan
    return math.log(loss / start) / math.log(full / start)


def square_cosines(gaps: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """cos^2 from 1 - cos; a gradient that points away from back-propagation's promises no progress: 0."""
    return np.asarray(np.clip(1 - np.asarray(gaps), 0, None) ** 2)


def gather_rates(records: Records) -> list[Rates]:
    """The trainings by task."""
    runs: dict[str, dict[tuple[int, int], Record]] = {}
    for name, record in records.items():
        if record.cell["kind"] == "TrainingCell":
            title = name.partition(", h = ")[0]
            runs.setdefault(title, {})[record.cell["seed"], record.cell["windows"]["size"]] = record
    return [_rates(title, found) for title, found in runs.items()]


def _rates(title: str, runs: Mapping[tuple[int, int], Record]) -> Rates:
    seeds, horizons = sorted({seed for seed, _ in runs}), sorted({h for _, h in runs})

    def rate(seed: int, h: int, place: int) -> float:
        ours, full = (runs[seed, one].result["test"] for one in (h, horizons[-1]))
        # A run that blew up has no evaluation there.
        loss = ours[place] if len(ours) == len(full) else math.nan
        return relative_rate(loss, start=ours[0], full=full[place])

    early, late = (np.array([[rate(seed, h, place) for h in horizons] for seed in seeds]) for place in (1, -1))
    whole = [runs[seed, horizons[-1]].result["angle_gaps"] for seed in seeds]
    squares = np.array([[square_cosines(gaps) for gaps in one.values()] for one in whole])
    return Rates(title, tuple(horizons), early, late, squares)


def gather_orders(records: Records) -> dict[tuple[Relation, int], list[float]]:
    """The orders of the deep linear nets by how their layers are related and T, an entry per seed."""
    orders: dict[tuple[Relation, int], list[float]] = {}
    for record in records.values():
        if record.cell["kind"] == DeepLinearCell.__name__:
            place = (record.cell["relation"], record.cell["num_blocks"])
            orders.setdefault(place, []).append(deep_linear_order(record.result["angle_gaps"]))
    return orders


def gather_choices(records: Records) -> list[Choice]:
    """h* of every measured curve and lambda; C is the measured memory, or h/T for the deep linear nets."""
    curves: list[tuple[str, NDArray[np.float64], NDArray[np.float64]]] = []
    for rates in gather_rates(records):
        held = records[f"memory of {rates.title}"].result["held"]
        costs = np.array([held[str(h)] for h in range(1, len(held) + 1)], dtype=float)
        curves.append((f"{rates.title}, start", rates.squares[:, 0].mean(axis=0), costs / costs[-1]))
        curves.append((f"{rates.title}, trained", rates.squares[:, -1].mean(axis=0), costs / costs[-1]))
    for relation in RELATIONS:
        found = [r for r in records.values() if r.cell.get("relation") == relation]
        depth = max(r.cell["num_blocks"] for r in found)
        gaps = np.array([r.result["angle_gaps"] for r in found if r.cell["num_blocks"] == depth])
        curves.append((f"deep linear, {relation}", square_cosines(gaps).mean(axis=0), np.arange(1, depth + 1) / depth))
    return [choose(*curve, share) for curve in curves for share in SHARES]
