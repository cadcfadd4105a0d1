"""Gantt charts of a schedule, simulated or measured."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpc_dist.schedule import Interval, Op

COLOURS = {
    Op.FORWARD: "#4c78a8",
    Op.RELAY: "#f2b134",
    Op.BACKWARD: "#54a24b",
    Op.INPUT_HALF: "#88c27e",
    Op.WEIGHT_HALF: "#b7a0d0",
    Op.UPDATE: "#444444",
}
NAMES = {
    Op.FORWARD: "forward",
    Op.RELAY: "relay",
    Op.BACKWARD: "backward",
    Op.INPUT_HALF: "backward, input half",
    Op.WEIGHT_HALF: "backward, weight half",
    Op.UPDATE: "update",
}


def draw_figure(timelines: Mapping[str, Sequence[Sequence[Interval]]], *, unit: str = "forwards of a stage") -> Figure:
    """One chart per timeline, by title: a row per rank, a bar per action with its micro-batch's number."""
    rows = max(len(timeline) for timeline in timelines.values())
    figure = Figure(figsize=(12, len(timelines) * (0.9 + 0.32 * rows) + 0.6), layout="constrained")
    used: set[Op] = set()
    for axes, (title, timeline) in zip(
        figure.subplots(len(timelines), 1, squeeze=False)[:, 0], timelines.items(), strict=True
    ):
        used |= draw_axes(axes, timeline, unit=unit)
        axes.set_title(title, loc="left", fontsize=10)
    figure.legend(handles=legend_of(used), loc="outside lower center", ncols=6, frameon=False)
    return figure


def draw_axes(axes: Axes, timeline: Sequence[Sequence[Interval]], *, unit: str) -> set[Op]:
    """One chart; the kinds of actions in it."""
    used: set[Op] = set()
    start = min((row[0].start for row in timeline if row), default=0.0)
    bars = sum(len(row) for row in timeline)
    for rank, row in enumerate(timeline):
        for interval in row:
            width = interval.end - interval.start
            op = interval.action.op
            if width <= 0:
                continue
            used.add(op)
            left = interval.start - start
            axes.barh(rank, width, left=left, height=0.86, color=COLOURS[op], edgecolor="white", linewidth=0.5)
            if op is not Op.UPDATE and bars < 1500:
                number = str(interval.action.microbatch)
                axes.text(left + width / 2, rank, number, ha="center", va="center", fontsize=6, clip_on=True)
    axes.set_yticks(range(len(timeline)))
    axes.set_ylabel("rank")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"time ({unit})")
    return used


def legend_of(used: set[Op]) -> list[Patch]:
    """A patch for each kind of action."""
    return [Patch(color=COLOURS[op], label=NAMES[op]) for op in COLOURS if op in used]
