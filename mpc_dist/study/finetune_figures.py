"""The figures of `reproduce finetune`: accuracy and memory against the horizon, and against each other."""

import re
from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpc_dist.report.angles import byte_unit
from mpc_dist.study.finetune_part import HEAD_ALONE, Part


def draw_horizons(parts: Sequence[Part]) -> Figure:
    """Accuracy above, memory below, a column per model."""
    figure = Figure(figsize=(5 * len(parts), 7), layout="constrained")
    grid = figure.subplots(2, len(parts), squeeze=False)
    for part, (above, below) in zip(parts, grid.T, strict=True):
        above.set_title(part.title)
        above.plot(part.horizons, [100 * part.at(h) for h in part.horizons], "-", color="tab:blue", label="sliding")
        dots = [(h, 100 * run.accuracy) for h in part.horizons for run in part.find(f"h = {h}")]
        above.plot(*zip(*dots, strict=True), "o", color="tab:blue", ms=4, alpha=0.6)
        _mark_others(above, part, lambda size, _: size)
        above.axhline(100 * part.accuracy(HEAD_ALONE), color="gray", ls="--", label=HEAD_ALONE)
        above.set_ylabel("test accuracy (%)")

        held, line = part.held, part.line
        unit, scale = byte_unit(max(held.values()))
        below.plot(list(held), [size / scale for size in held.values()], "o", color="tab:orange", label="measured")
        fitted = [line.at(h) / scale for h in held]
        below.plot(list(held), fitted, "-", color="gray", label=f"line, R² = {line.r_squared:.4f}")
        below.set_ylabel(f"held for backward ({unit})")
        below.set_ylim(bottom=0)
        blocks = f"units of {part.unit} blocks" if part.unit > 1 else "blocks"
        for axes in (above, below):
            axes.set_xlabel(f"horizon h ({blocks}; {part.horizons[-1]} is back-propagation)")
            axes.set_xticks(range(1, part.horizons[-1] + 1))
            _finish(axes)
    return figure


def draw_tradeoff(parts: Sequence[Part]) -> Figure:
    """Accuracy against the share of memory, a panel per model."""
    figure = Figure(figsize=(5 * len(parts), 4), layout="constrained")
    for part, axes in zip(parts, figure.subplots(1, len(parts), squeeze=False)[0], strict=True):
        axes.set_title(part.title)
        points = [(100 * part.share(h), 100 * part.at(h)) for h in part.horizons]
        axes.plot(*zip(*points, strict=True), "o-", color="tab:blue", label="sliding")
        for h, point in zip(part.horizons, points, strict=True):
            axes.annotate(f"h={h}", point, xytext=(3, 5), textcoords="offset points", fontsize=8)
        _mark_others(axes, part, partial(_percent_held, part))
        axes.axhline(100 * part.accuracy(HEAD_ALONE), color="gray", ls="--", label=HEAD_ALONE)
        axes.set_xlim(0, 108)
        axes.set_xlabel("held for backward (% of back-propagation's)")
        axes.set_ylabel("test accuracy (%)")
        _finish(axes)
    return figure


def _percent_held(part: Part, _: int, words: str) -> float:
    return 100 * part.held_by(words) / part.held[part.horizons[-1]]


def _mark_others(axes: Axes, part: Part, place: Callable[[int, str], float]) -> None:
    """Tumbling windows and shared readouts; `place` gives their x from size and words."""
    for kind, pattern, marker in (
        ("tumbling", r"tumbling (\d+)", "s"),
        ("sliding, shared readout", r"h = (\d+), shared", "^"),
    ):
        found = [(match, words) for words in part.variants if (match := re.fullmatch(pattern, words)) is not None]
        points = [(place(int(match[1]), words), 100 * part.accuracy(words)) for match, words in found]
        if points:
            color = "tab:green" if kind == "tumbling" else "tab:red"
            axes.plot(*zip(*points, strict=True), marker, color=color, label=kind)


def _finish(axes: Axes) -> None:
    axes.legend()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
