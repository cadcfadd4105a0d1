"""A measured step beside the simulated one: a bar per action, hatching where a rank is idle."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from mpc_dist.report.panel import Drawing, LegendEntry, Panel, Shown, format_percent
from mpc_dist.report.plan import format_seconds
from mpc_dist.report.replay import Replay, Row, mean_idle_share
from mpc_dist.report.svg import Scale, add, fit_scale, picture
from mpc_dist.report.timeline import NAMES
from mpc_dist.schedule import Op

WIDTH = 1160.0
LEFT, RIGHT = 96.0, 84.0
MAX_STRETCH = 8.0
"""Steps that differ by more than this factor get time axes of their own."""
MIN_TEXT_WIDTH = 11.0
"""Pixels below which a bar has no number."""


def timeline(runs: Sequence[Shown]) -> Panel:
    """Each run's step as it ran and as the simulator has it, on one time axis."""
    title = "Timeline of a step"
    replays = [(one, found) for one in runs if isinstance(found := one.replay, Replay)]
    notes = [f"{one.name}: no timeline, {one.replay}." for one in runs if isinstance(one.replay, str)]
    if not replays:
        return Panel("timeline", title, "", missing="No timeline. " + " ".join(notes), is_wide=True)
    ends = [found.end for _, found in replays]
    is_common = max(ends) <= MAX_STRETCH * min(ends)
    if not is_common:
        notes.append("The steps differ too much in length for one time axis: each run has its own.")
    used = {interval.action.op for _, found in replays for row in found.measured for interval in row.intervals}
    drawings = tuple(
        Drawing(_draw(found, max(ends) if is_common else found.end), one.name, one.style, _describe(found))
        for one, found in replays
    )
    legend = [LegendEntry(NAMES[op], f"op-{op.value}", "box") for op in NAMES if op in used]
    return Panel(
        "timeline",
        title,
        "The median of the last steps, from the end of one update to the end of the next, above the same schedule "
        "simulated from the measured times of its actions with free messages. Numbers are micro-batches; the share at "
        "the right is the bubble: the time in which the rank waits, loads its batch or writes metrics. A rank that is "
        "faster than the next runs ahead of it.",
        drawings,
        (*legend, LegendEntry("idle (bubble)", "plain", "hatch")),
        notes=tuple(notes),
        is_wide=True,
    )


def _describe(found: Replay) -> str:
    measured, simulated = (format_percent(mean_idle_share(rows)) for rows in (found.measured, found.simulated))
    words = (
        f"Step {found.step:,}: {format_seconds(found.measured_seconds)} measured with a bubble of "
        f"{measured}, {format_seconds(found.simulated_seconds)} simulated with {simulated}."
    )
    if found.lag > 0:
        words += (
            f" No barrier ties the ranks: the last one was {format_seconds(found.lag)} further behind than it is drawn."
        )
    slow = found.straggler
    if slow is not None:
        words += (
            f" Rank {slow} stands out: it computes for {format_seconds(found.median_busy[slow])} in the median step, "
            "far longer than the others. Is its part larger, or its machine busy?"
        )
    return words


def _draw(found: Replay, end: float) -> Element:
    num_rows = len(found.measured)
    height = 22.0 if num_rows <= 8 else 16.0 if num_rows <= 32 else 10.0
    block = 22 + num_rows * (height + 3)
    total = 2 * block + 50
    svg = picture(WIDTH, total, class_="chart gantt")
    scale = 1.0 if end >= 1 else 1000.0
    x = fit_scale([0.0, end * scale], start=LEFT, end=WIDTH - RIGHT, num_ticks=10, is_tight=True)
    grid, text = add(svg, "g", class_="grid"), add(svg, "g", class_="ticks")
    bottom = 2 * block + 8
    for tick, label in zip(x.ticks, x.labels, strict=True):
        add(grid, "line", x1=x(tick), x2=x(tick), y1=18, y2=bottom)
        add(text, "text", label, x=x(tick), y=bottom + 16, text_anchor="middle")
    labels = add(svg, "g", class_="labels")
    add(labels, "text", f"time ({'s' if scale == 1 else 'ms'})", x=x.end, y=bottom + 34, text_anchor="end")
    for index, (name, rows) in enumerate((("measured", found.measured), ("simulated", found.simulated))):
        top = index * (block + 4)
        add(labels, "text", name, class_="strong", x=4, y=top + 13)
        for place, row in enumerate(rows):
            _draw_row(svg, row, x, scale, top + 20 + place * (height + 3), height)
    return svg


def _draw_row(svg: Element, row: Row, x: Scale, scale: float, top: float, height: float) -> None:
    middle = top + height / 2 + 4
    ticks = add(svg, "g", class_="ticks")
    add(ticks, "text", f"rank {row.rank}", x=LEFT - 10, y=middle, text_anchor="end")
    share = f"{format_percent(row.idle_share)} idle"
    add(ticks, "text", share, x=WIDTH - RIGHT + 10, y=middle)
    bars = add(svg, "g", class_="bars")
    for start, end in row.gaps:
        left, right = x(start * scale), x(end * scale)
        if right - left >= 0.5:
            gap = add(bars, "rect", class_="idle", x=left, y=top, width=right - left, height=height)
            add(gap, "title", f"rank {row.rank} idle for {format_seconds(end - start)}")
    for action, start, end in row.intervals:
        left, right = x(start * scale), x(end * scale)
        if right <= left:
            continue
        bar = add(bars, "rect", class_=f"work op-{action.op.value}", x=left, y=top, width=right - left, height=height)
        what = NAMES[action.op] + (f" of micro-batch {action.microbatch}" if action.op is not Op.UPDATE else "")
        add(bar, "title", f"rank {row.rank}: {what}, {format_seconds(end - start)}")
        if right - left >= MIN_TEXT_WIDTH and height >= 16 and action.op is not Op.UPDATE:
            add(
                bars,
                "text",
                str(action.microbatch),
                class_=f"number on-{action.op.value}",
                x=(left + right) / 2,
                y=middle,
                text_anchor="middle",
            )
