"""The figures of the windows experiment."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "backprop": "black",
    "sliding 1": "tab:blue",
    "sliding 2": "tab:red",
    "sliding 4": "tab:orange",
    "tumbling 2": "tab:green",
    "tumbling 4": "darkgreen",
    "cumulative 2": "tab:purple",
}
OTHER = "tab:gray"
LEAST, MOST = 0.1, 3.0
"""Ratios beyond are drawn at the edge."""


def draw_losses(losses: Mapping[str, Mapping[str, float]]) -> Figure:
    """Loss relative to h = 1, a row per setting."""
    figure = Figure(figsize=(9, 1.6 + 0.36 * len(losses)), layout="constrained")
    axes = figure.subplots()
    for windows, colour in COLOURS.items():
        points = [
            (min(max(of[windows] / of["sliding 1"], LEAST), MOST), row)
            for row, of in enumerate(losses.values())
            if windows in of and math.isfinite(of[windows] / of["sliding 1"])
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, color=colour, s=42, label=windows.replace("sliding 1", "h = 1"), zorder=3)
    axes.axvline(1, color=COLOURS["sliding 1"], lw=1)
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.1, MOST * 1.1)
    ticks = (0.1, 0.2, 0.5, 1, 2, MOST)
    axes.set_xticks(ticks, [f"{v:g}" for v in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(losses)), list(losses), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("test loss / test loss of h = 1")
    axes.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    _finish(axes)
    return figure


def draw_drift(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """State size over the steps, and angles at the end."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for windows, of in runs.items():
        is_near = windows.endswith("near")
        if windows not in COLOURS and not is_near:
            continue
        steps = [int(step) for step in of[0]["interior"]]
        complete = [run for run in of if len(run["interior"]) == len(steps)]
        sizes = [statistics.fmean(max(run["interior"][str(s)]["sizes"]) for run in complete) for s in steps]
        colour = COLOURS.get(windows, OTHER)
        left.plot(steps, sizes, marker="o", ms=3, color=colour, ls=_dashes(windows), label=windows)
        last = str(steps[-1])
        cosines = [run["cosines"][last] for run in complete if last in run.get("cosines", ())]
        if cosines:
            mean = [statistics.fmean(values) for values in zip(*cosines, strict=True)]
            right.plot(range(1, len(mean) + 1), mean, marker="o", ms=3, color=colour, label=windows)
    left.set_yscale("log")
    left.set_xlabel("step")
    left.set_ylabel("largest root mean square of a state")
    right.set_xlabel("horizon h of the gradient (blocks)")
    right.set_ylabel("cos(theta_h) at the end of training")
    left.legend(fontsize=8)
    right.legend(fontsize=8, title="trained with")
    for axes in (left, right):
        _finish(axes)
    return figure


def _dashes(windows: str) -> str:
    weights = {"sliding 2 + 0.1 near": ":", "sliding 2 + 0.3 near": "--", "sliding 2 + 1 near": "-."}
    return weights.get(windows, "-")


def draw_modes(modes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Chains at zero and simulated errors, a bar per window map and depth."""
    names = list(next(iter(modes.values())))
    figure = Figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(modes)
    for i, (depth, of) in enumerate(modes.items()):
        places = [row + i * height for row in range(len(names))]
        colour = ("tab:blue", "tab:orange")[i % 2]
        left.barh(places, [of[w]["chain"] for w in names], height, color=colour, label=f"{depth} blocks")
        right.barh(places, [statistics.fmean(of[w]["drift"]) for w in names], height, color=colour)
    left.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names, fontsize=9)
    left.invert_yaxis()
    left.set_xlabel("longest Jordan chain at eigenvalue 0")
    right.set_xlabel("error under gradient noise")
    right.set_xscale("log")
    left.legend()
    for axes in (left, right):
        _finish(axes)
    return figure


def draw_prediction(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Figure:
    """A point per window map."""
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    shared = [w for w in measured if w in predicted and math.isfinite(measured[w])]
    # Points that lie close get their names on alternating sides.
    for i, windows in enumerate(sorted(shared, key=lambda w: predicted[w])):
        point = (predicted[windows], measured[windows])
        axes.scatter(*point, color=COLOURS.get(windows, OTHER), s=45, zorder=3)
        right = i % 2 == 1
        axes.annotate(
            windows,
            point,
            (7 if right else -7, 4 if right else -4),
            textcoords="offset points",
            fontsize=8,
            ha="left" if right else "right",
            va="bottom" if right else "top",
        )
    axes.set_xscale("log")
    axes.margins(0.14, 0.16)
    axes.set_xlabel("error under gradient noise in the linear model of 8 blocks")
    axes.set_ylabel("test loss measured")
    _finish(axes)
    return figure


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
