"""Draws the heat map of Rel, and measured rates beside their estimates."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mpc_dist.study.selection_score import METHODS, Model, Score

LEAST_RATE = -0.5
"""Rates below are drawn here."""
DARK = 0.12
"""This near to either end of the scale, colours are too dark for black letters."""


def draw_heat_map(scores: Mapping[str, list[Score]]) -> Figure:
    """A panel per model: methods by cost, objective and parameter."""
    figure = Figure(figsize=(10, 1.7 * len(scores) + 2.0), layout="constrained")
    panels = figure.subplots(len(scores), 1, squeeze=False, sharex=True)[:, 0]
    image = None
    for axes, (title, rows) in zip(panels, scores.items(), strict=True):
        values = np.array([[row.rel[method] for row in rows] for method in METHODS])
        axes.set_facecolor("lightgray")
        image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn_r", aspect="auto")
        for (line, column), value in np.ndenumerate(values):
            words = "x" if math.isnan(value) else f"{value:.2f}"
            colour = "white" if value < DARK or value > 1 - DARK else "black"
            axes.text(column, line, words, color=colour, ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(METHODS)), METHODS, fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks(range(len(rows)), [row.setting for row in rows], rotation=40, ha="right", fontsize=8)
    assert image is not None
    figure.colorbar(image, ax=list(panels), label="Rel (0 best horizon, 1 worst feasible)", shrink=0.7)
    return figure


def draw_rates(models: Sequence[Model]) -> Figure:
    """r(h) and cos^2, a panel per model."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        measured = model.measured
        rates = [max(model.rates[h], LEAST_RATE) for h in measured]
        axes.plot(measured, rates, "o-", ms=4, color="tab:blue", label="r(h), measured")
        axes.plot(list(model.cosines), [c**2 for c in model.cosines.values()], "-", color="tab:orange", label="cos²")
        for (name, (rate, _)), style in zip(model.loco.items(), (":", "--"), strict=True):
            axes.axhline(max(rate, LEAST_RATE), ls=style, color="gray", lw=1, label=f"r of {name}")
        axes.set_title(model.title, fontsize=10)
        axes.set_xlabel("horizon h (blocks)")
        axes.set_ylabel("relative rate")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
