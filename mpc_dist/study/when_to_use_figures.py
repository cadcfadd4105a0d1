"""The figures of the page on when to use horizon training: quality against memory, time against M, who wins where."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mpc_dist.report.angles import byte_unit
from mpc_dist.study.outcome import Panel, find_wins

SIZE = (10, 5.4)
MARKERS = "osD^vP*Xp<"
NUM_LIMITS = 160
"""Rows of the map of winners."""


def _colors(panels: Sequence[Panel]) -> dict[str, str]:
    """Black and greys for back-propagation, colours for windows; the same in all figures."""
    systems = {one.system: one.is_backprop for panel in panels for one in panel.outcomes}
    greys = iter(["black", "dimgrey", "darkgrey", "lightgrey"])
    tints = iter(to_hex(tint) for tint in colormaps["tab10"].colors if len(set(tint)) > 1)  # type: ignore[attr-defined]
    return {name: next(greys) if is_backprop else next(tints) for name, is_backprop in systems.items()}


def _markers(panels: Sequence[Panel]) -> dict[str, str]:
    systems = dict.fromkeys(one.system for panel in panels for one in panel.outcomes)
    return {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(systems)}


def _start(panels: Sequence[Panel]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, len(panels))))
    for one, panel in zip(axes, panels, strict=True):
        one.set_title(panel.title, fontsize=10)
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_quality(panels: Sequence[Panel], num_microbatches: int) -> Figure:
    """Test loss at the end, with its spread over seeds, against what the fullest rank holds for backward."""
    figure, all_axes = _start(panels)
    colors, markers = _colors(panels), _markers(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        for one in panel.outcomes:
            if num_microbatches in one.steps and np.isfinite(one.learnt.loss):
                axes.errorbar(
                    one.steps[num_microbatches].live_bytes / 1024,
                    one.learnt.loss,
                    yerr=one.learnt.spread,
                    fmt=markers[one.system],
                    color=colors[one.system],
                    markeredgecolor="black",
                    markeredgewidth=0.5,
                    ms=8,
                    capsize=3,
                    label=one.system,
                )
        axes.axhline(panel.backprop.learnt.loss, color="black", lw=0.8, ls=":")
        axes.set_xscale("log")
        _label_plainly(axes.xaxis)
        axes.set_xlabel(f"held for backward by the fullest rank, M = {num_microbatches} (KiB)")
        axes.set_ylabel("test loss at the end")
    _add_legend(figure, all_axes)
    return figure


def draw_times(panels: Sequence[Panel]) -> Figure:
    """Time to the target against the number of micro-batches."""
    figure, all_axes = _start(panels)
    colors, markers = _colors(panels), _markers(panels)
    for axes, panel in zip(all_axes, panels, strict=True):
        for one in panel.outcomes:
            if one.times:
                axes.plot(
                    list(one.times),
                    list(one.times.values()),
                    color=colors[one.system],
                    marker=markers[one.system],
                    ms=5,
                    ls="--" if one.is_backprop else "-",
                    label=one.system,
                )
        missed = [one.system for one in panel.outcomes if not one.times]
        if missed:
            lines = [", ".join(missed[start : start + 3]) for start in range(0, len(missed), 3)]
            axes.set_title(f"{panel.title}\nnever there: " + "\n".join(lines), fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _label_plainly(axes.yaxis)
        axes.set_xticks(panel.microbatches, labels=[str(m) for m in panel.microbatches])
        axes.set_xlabel("micro-batches M of the same batch")
        axes.set_ylabel(f"time to test loss {panel.target:.3f}\n(forwards of a stage and batch)")
    _add_legend(figure, all_axes)
    return figure


def draw_wins(panels: Sequence[Panel]) -> Figure:
    """The fastest system to the target, by number of micro-batches and memory of a rank."""
    figure, all_axes = _start(panels)
    colors = _colors(panels)
    names = list(colors)
    cmap, norm = ListedColormap(list(colors.values())), BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    seen: set[str] = set()
    for axes, panel in zip(all_axes, panels, strict=True):
        sizes = [step.live_bytes for one in panel.outcomes for step in one.steps.values()]
        limits = np.geomspace(min(sizes) / 1.15, max(sizes) * 1.3, NUM_LIMITS)
        grid = np.full((NUM_LIMITS, len(panel.microbatches)), np.nan)
        for column, m in enumerate(panel.microbatches):
            for win in find_wins(panel.outcomes, [m]):
                grid[limits >= win.from_bytes, column] = names.index(win.choice.outcome.system)
                seen.add(win.choice.outcome.system)
        unit, scale = byte_unit(max(sizes))
        edges = np.arange(len(panel.microbatches) + 1) - 0.5
        rows = np.geomspace(limits[0], limits[-1], NUM_LIMITS + 1) / scale
        axes.grid(False)
        axes.pcolormesh(edges, rows, np.ma.masked_invalid(grid), cmap=cmap, norm=norm)
        for edge in edges[1:-1]:
            axes.axvline(edge, color="white", lw=1.5)
        axes.set_yscale("log")
        _label_plainly(axes.yaxis)
        axes.set_xticks(range(len(panel.microbatches)), labels=[str(m) for m in panel.microbatches])
        axes.set_xlabel("micro-batches M of the same batch")
        axes.set_ylabel(f"bytes that a rank can hold for backward ({unit})")
    handles = [Patch(color=colors[name], label=name) for name in names if name in seen]
    handles.append(Patch(facecolor="white", edgecolor="grey", label="none fits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _label_plainly(axis: Axis) -> None:
    """Plain numbers on a log axis, at 1, 2 and 5 of each power."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _add_legend(figure: Figure, all_axes: Sequence[Axes]) -> None:
    found: dict[str, Artist] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), handle)
    figure.legend(handles=list(found.values()), labels=list(found), loc="outside lower center", ncols=5, fontsize=9)
