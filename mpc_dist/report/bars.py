"""Memory of every rank as bars: what is held for backward on top of weights, gradients and optimizer state."""

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from mpc_dist.report.angles import byte_unit, format_bytes
from mpc_dist.report.panel import Drawing, LegendEntry, Panel, Shown, Table
from mpc_dist.report.svg import Scale, add, draw_axes, fit_scale, picture

WIDTH, HEIGHT = 560.0, 310.0
MAX_BAR = 46.0


def memory_by_rank(runs: Sequence[Shown]) -> Panel:
    """Live and whole bytes of every rank of every run."""
    title = "Memory by rank"
    held = {
        (one.index, rank.rank): (rank.live_bytes, rank.rank_bytes)
        for one in runs
        for rank in one.run.ranks
        if rank.live_bytes is not None and rank.rank_bytes is not None
    }
    if not held:
        return Panel("memory-by-rank", title, "", missing="No memory: it is written with the first step.")
    shown = [one for one in runs if any(index == one.index for index, _ in held)]
    predicted = {
        (one.index, stage * one.run.num_replicas + replica): size
        for one in shown
        if one.run.plan is not None
        for stage, size in enumerate(one.run.plan.chosen.bytes_per_rank)
        for replica in range(one.run.num_replicas)
    }
    rows = [
        (
            one.name,
            str(rank),
            format_bytes(live),
            format_bytes(whole),
            *(_write_prediction(predicted.get((one.index, rank))) if predicted else ()),
        )
        for one in shown
        for (index, rank), (live, whole) in held.items()
        if index == one.index
    ]
    headings = ("run", "rank", "held for backward", "whole rank", *(("predicted",) if predicted else ()))
    legend = [LegendEntry(one.name, one.style, "box") for one in shown]
    legend += [
        LegendEntry("held for backward", "plain", "box"),
        LegendEntry("weights, gradients, optimizer", "plain", "faded"),
    ]
    legend += [LegendEntry("predicted by the plan", "plain", "tick")] if predicted else []
    return Panel(
        "memory-by-rank",
        title,
        "Most bytes at once on each rank, counted in the first step: solid what is held for backward, faded weights, "
        "gradients and optimizer state.",
        (Drawing(_draw(shown, held, predicted)),),
        tuple(legend),
        tables=(Table("Bytes", headings, tuple(rows)),),
    )


def _write_prediction(size: float | None) -> tuple[str]:
    return ("" if size is None else format_bytes(size),)


def _draw(
    shown: Sequence[Shown], held: dict[tuple[int, int], tuple[int, int]], predicted: dict[tuple[int, int], float]
) -> Element:
    svg = picture(WIDTH, HEIGHT, class_="chart")
    largest = max([*(whole for _, whole in held.values()), *predicted.values()])
    unit, scale = byte_unit(largest)
    y = fit_scale([0.0, largest / scale], start=HEIGHT - 44, end=34, from_zero=True)
    ranks = range(max(rank for _, rank in held) + 1)
    left = 18 + 7.2 * max(map(len, y.labels))
    every = -(-len(ranks) // 16)
    ticks = tuple(float(rank) for rank in ranks[::every])
    x = Scale(-0.5, len(ranks) - 0.5, left, WIDTH - 18, ticks, tuple(f"{tick:g}" for tick in ticks))
    draw_axes(svg, x, y, x_label="rank", y_label=f"memory ({unit})")
    width = min(MAX_BAR, 0.72 * (x(1) - x(0)) / len(shown))
    for rank in ranks:
        present = [one for one in shown if (one.index, rank) in held]
        for place, one in enumerate(present):
            group = add(svg, "g", class_=f"series {one.style}")
            live, whole = held[one.index, rank]
            start = x(rank) + (place - len(present) / 2) * width
            gap = min(2.0, width / 6)
            inner = width - gap
            words = f"{one.name}, rank {rank}: {format_bytes(live)} held for backward, {format_bytes(whole)} in all"
            for style, top, bottom in (("bar", live, 0), ("bar faded", whole, live)):
                height = y(bottom / scale) - y(top / scale)
                bar = add(group, "rect", class_=style, x=start, y=y(top / scale), width=inner, height=height)
                add(bar, "title", words)
            if (one.index, rank) in predicted:
                level = y(predicted[one.index, rank] / scale)
                line = add(group, "line", class_="expected", x1=start - 3, x2=start + inner + 3, y1=level, y2=level)
                add(line, "title", f"predicted: {format_bytes(predicted[one.index, rank])}")
    return svg
