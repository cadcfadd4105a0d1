"""Draws losses and step times against the horizon."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpc_dist.study.horizon_curves import Curves

MOST_LINES = 6


def draw_final(tasks: Sequence[Curves]) -> Figure:
    """A panel per task: loss at the end against the horizon."""
    figure, panels = _panels(len(tasks))
    for axes, curves in zip(panels, tasks, strict=True):
        # The test loss a little to the right, so that both ranges are seen.
        for kind, colour, mark, shift in (("train", "tab:blue", "o", 0.0), ("test", "tab:orange", "s", 0.15)):
            shown = [h for h in curves.horizons if math.isfinite(curves.final(kind, h))]
            middle = [curves.final(kind, h) for h in shown]
            spreads = [curves.spread(kind, h) for h in shown]
            below = [value - low for value, (low, _) in zip(middle, spreads, strict=True)]
            above = [high - value for value, (_, high) in zip(middle, spreads, strict=True)]
            label = "training" if kind == "train" else "test"
            places = [h + shift for h in shown]
            axes.errorbar(places, middle, (below, above), fmt=f"{mark}-", color=colour, ms=4, capsize=2, label=label)
        lost = [h for h in curves.horizons if not math.isfinite(curves.final("train", h))]
        axes.plot(lost, [0.97] * len(lost), "x", color="tab:red", transform=axes.get_xaxis_transform())
        _set_scale(axes, [value for value in curves.finals("test") if math.isfinite(value)])
        axes.set_title(curves.title, fontsize=10)
        axes.set_xlabel("horizon h (blocks)")
        axes.set_ylabel("loss at the end")
        axes.legend(fontsize=8)
    return figure


def draw_over_epochs(tasks: Sequence[Curves]) -> Figure:
    """A panel per task: training loss on the way, for some horizons."""
    figure, panels = _panels(len(tasks))
    for axes, curves in zip(panels, tasks, strict=True):
        chosen = choose_lines(curves.horizons)
        colours = colormaps["viridis"]
        for place, horizon in enumerate(chosen):
            is_full = horizon == curves.num_blocks
            points = range(len(curves.runs[horizon][0]["train"]))
            values = [curves.at("train", horizon, point) for point in points]
            axes.plot(
                [point + 1 for point in points],
                [value if math.isfinite(value) else math.nan for value in values],
                color="black" if is_full else colours(0.9 * place / max(len(chosen) - 1, 1)),
                lw=2.0 if is_full else 1.3,
                label=f"h = {horizon}",
            )
        shown = [value for runs in curves.runs.values() for run in runs for value in run["train"]]
        _set_scale(axes, [value for value in shown if math.isfinite(value)])
        axes.set_title(curves.title, fontsize=10)
        axes.set_xlabel(f"{curves.unit}s" if curves.unit == "epoch" else f"evaluations, every {curves.unit}")
        axes.set_ylabel("training loss")
        axes.legend(fontsize=8)
    return figure


def draw_step_times(times: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Simulated for one and eight micro-batches, and measured in one process."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    one, eight, measured = figure.subplots(1, 3)
    for name, result in times.items():
        label, horizons = name.split(",")[0], result["horizons"]
        one.plot(horizons, result["simulated"]["1"], "o-", ms=3, label=label)
        eight.plot(horizons, result["simulated"]["8"], "o-", ms=3, label=label)
        full = result["measured"][-1]
        measured.plot(horizons, [value / full for value in result["measured"]], "o-", ms=3, label=label)
    for axes, title, unit in (
        (one, "simulated, 1 micro-batch", "forwards of a stage"),
        (eight, "simulated, 8 micro-batches", "forwards of a stage"),
        (measured, "one process (noisy)", "time / back-propagation's"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("horizon h (blocks)")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        _tidy(axes)
    return figure


def choose_lines(horizons: Sequence[int]) -> list[int]:
    """A few of them, the first, the second and the last among them."""
    if len(horizons) <= MOST_LINES:
        return list(horizons)
    last = len(horizons) - 1
    places = {0, 1, last, *(round(last * i / (MOST_LINES - 2)) for i in range(1, MOST_LINES - 2))}
    return [horizons[place] for place in sorted(places)]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = 2 if count > 1 else 1
    rows = -(-count // columns)
    figure = Figure(figsize=(9.5, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in panels[:count]:
        _tidy(axes)
    return figure, panels[:count]


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
