"""The curves of runs over each other: loss, throughput, early exits, horizon."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpc_dist.report.panel import Drawing, LegendEntry, Panel, Shown, Table
from mpc_dist.report.series import Point
from mpc_dist.report.svg import LineChart, Series


def loss_by_step(runs: Sequence[Shown]) -> Panel:
    """Loss against optimizer steps."""
    return _loss_panel(runs, "step", "loss-by-step", "Loss by step", by_time=False)


def loss_by_time(runs: Sequence[Shown]) -> Panel:
    """Loss against the time it took."""
    return _loss_panel(runs, "time", "loss-by-time", "Loss by time", by_time=True)


def throughput(runs: Sequence[Shown]) -> Panel:
    """Samples per second."""
    series = tuple(
        Series(one.name, tuple((point.step, point.value) for point in one.run.throughput), one.style)
        for one in runs
        if one.run.throughput
    )
    title = "Throughput"
    if not series:
        return Panel("throughput", title, "", missing="No throughput: no step after the first was written yet.")
    chart = LineChart(
        series,
        "step",
        "samples per second",
        format_x=_format_step,
        format_y=_three_digits,
        from_zero=True,
        whole_x=True,
    )
    caption = "Samples per second of the slowest rank at each logged step, over all replicas."
    return Panel("throughput", title, caption, (Drawing(chart.draw()),), _legend_of(runs, "line"))


def bubble_by_step(runs: Sequence[Shown]) -> Panel:
    """The share of each step in which ranks waited."""
    series = tuple(
        Series(one.name, tuple((point.step, 100 * point.value) for point in one.run.bubbles), one.style)
        for one in runs
        if one.run.bubbles
    )
    title = "Bubble by step"
    if not series:
        return Panel("bubble-by-step", title, "", missing="No bubble: no step after the first was written yet.")
    chart = LineChart(
        series,
        "step",
        "bubble (%)",
        format_x=_format_step,
        format_y=lambda share: f"{share:.1f} %",
        from_zero=True,
        least_span=10,
        whole_x=True,
    )
    caption = "The share of each logged step in which a rank neither computed nor updated, averaged over ranks."
    return Panel("bubble-by-step", title, caption, (Drawing(chart.draw()),), _legend_of(runs, "line"))


def accuracy_by_boundary(runs: Sequence[Shown]) -> Panel:
    """How good the chain is when it is cut off at each readout."""
    found = [(one, one.run.last_evaluation) for one in runs]
    evaluated = [(one, last) for one, last in found if last is not None]
    classified = [
        (one, last) for one, last in evaluated if any(score.accuracy is not None for score in last.exits.values())
    ]
    is_accuracy = bool(classified)
    title = "Early exits: test accuracy by boundary" if is_accuracy else "Early exits: test loss by boundary"
    if not evaluated:
        return Panel(
            "accuracy-by-boundary", "Early exits by boundary", "", missing="No early exits: no evaluation is complete."
        )
    drawn = classified if is_accuracy else evaluated
    series = []
    for one, last in drawn:
        values = ((s, _percent(score.accuracy) if is_accuracy else score.loss) for s, score in last.exits.items())
        points = tuple((float(s), value) for s, value in values if value is not None)
        series.append(Series(one.name, points, one.style, one.shape))
    num_blocks = max(one.run.num_blocks for one, _ in drawn)
    chart = LineChart(
        tuple(series),
        "boundary (blocks before the exit)",
        "test accuracy (%)" if is_accuracy else "test loss",
        format_x=lambda s: f"boundary {s:g}",
        format_y=(lambda share: f"{share:.2f} %") if is_accuracy else _four_digits,
        may_log=not is_accuracy,
        least_span=4 if is_accuracy else 0,
        x_ticks=tuple(map(float, range(1, num_blocks + 1))),
        x_limits=(0.5, num_blocks + 0.5),
    )
    left_out = [one.name for one, last in found if last is None]
    regressions = [one.name for one, _ in evaluated if one not in [other for other, _ in drawn]]
    notes = [
        *([f"{_join(left_out)}: no evaluation is complete."] if left_out else []),
        *([f"{_join(regressions)}: no accuracy, the task is a regression."] if regressions else []),
    ]
    rows = []
    for one, last in evaluated:
        for boundary, score in last.exits.items():
            accuracy = "" if score.accuracy is None else f"{100 * score.accuracy:.2f} %"
            rows.append((one.name, str(last.step), str(boundary), f"{score.loss:.4f}", accuracy))
    table = Table("Scores of the last evaluation", ("run", "step", "boundary", "test loss", "accuracy"), tuple(rows))
    caption = (
        "The last evaluation of every readout: the chain cut off after that many blocks. The last one is the model."
    )
    return Panel(
        "accuracy-by-boundary",
        title,
        caption,
        (Drawing(chart.draw()),),
        tuple(LegendEntry(one.name, one.style, one.shape) for one, _ in drawn),
        notes=tuple(notes),
        tables=(table,),
    )


def horizon_history(runs: Sequence[Shown]) -> Panel:
    """How the adaptive rule grew the windows, and the angle that it saw."""
    title = "Horizon history"
    adaptive = [one for one in runs if one.run.adaptations]
    waiting = [one.name for one in runs if one not in adaptive and one.run.config["horizon"]["mode"] == "adaptive"]
    fixed = [one.name for one in runs if one not in adaptive and one.name not in waiting]
    notes = [
        *([f"{_join(waiting)}: adaptive, but no decision was made yet."] if waiting else []),
        *([f"{_join(fixed)}: trained with a fixed horizon."] if fixed else []),
    ]
    if not adaptive:
        return Panel("horizon-history", title, "", missing=" ".join(notes), is_wide=True)
    sizes = tuple(
        Series(
            one.name,
            (
                (0.0, float(one.run.adaptations[0].before)),
                *((float(made.step), float(made.size)) for made in one.run.adaptations),
            ),
            one.style,
            is_steps=True,
        )
        for one in adaptive
    )
    cosines = tuple(
        Series(one.name, tuple((float(made.step), made.cosine) for made in one.run.adaptations), one.style, one.shape)
        for one in adaptive
    )
    size_chart = LineChart(
        sizes,
        "step",
        "stages per window",
        format_x=_format_step,
        format_y=lambda size: f"{size:g} stage{'s' if size > 1 else ''}",
        from_zero=True,
        whole_x=True,
        whole_y=True,
    )
    cosine_chart = LineChart(
        cosines,
        "step",
        "cosine to back-propagation's gradient",
        format_x=_format_step,
        format_y=lambda cosine: f"{cosine:.3f}",
        from_zero=True,
        whole_x=True,
    )
    rows = [
        (
            one.name,
            str(made.step),
            f"{made.before} → {made.size}",
            f"{made.cosine:.3f}",
            f"{made.loss:.4f}",
            made.reason,
        )
        for one in adaptive
        for made in one.run.adaptations
    ]
    headings = ("run", "step", "stages", "cosine", "loss", "why")
    return Panel(
        "horizon-history",
        title,
        "First: how many stages a window spans. Second: the cosine of the present windows' gradient to that of "
        "back-propagation, at each decision.",
        (Drawing(size_chart.draw()), Drawing(cosine_chart.draw())),
        _legend_of(adaptive, "line"),
        notes=tuple(notes),
        tables=(Table("Every decision", headings, tuple(rows)),),
        is_wide=True,
    )


def _loss_panel(runs: Sequence[Shown], unit: str, panel: str, title: str, *, by_time: bool) -> Panel:
    drawn = [one for one in runs if one.run.train_losses]
    if not drawn:
        return Panel(panel, title, "", missing="No loss: the last stage wrote no step yet.")
    clock = _clock_for(max((point.elapsed for one in drawn for point in one.run.train_losses), default=0.0))

    def place(points: Sequence[Point]) -> tuple[tuple[float, float], ...]:
        return tuple((point.elapsed / clock.seconds if by_time else point.step, point.value) for point in points)

    series = []
    for one in drawn:
        series.append(Series(f"{one.name}, training", place(one.run.train_losses), one.style))
        series.append(Series(f"{one.name}, test", place(one.run.test_losses), one.style, one.shape, is_line=False))
    chart = LineChart(
        tuple(series),
        f"time ({clock.unit})" if by_time else unit,
        "loss",
        format_x=(lambda value: f"{_three_digits(value)} {clock.unit}") if by_time else _format_step,
        format_y=_four_digits,
        may_log=True,
        whole_x=not by_time,
    )
    caption = "Loss at the last boundary: the line in training, the marks on test data."
    if by_time:
        caption += " Time since the start of each run, evaluations included, pauses before a resume not."
    broken = [one.name for one in drawn if any(not math.isfinite(point.value) for point in one.run.train_losses)]
    return Panel(
        panel,
        title,
        caption,
        (Drawing(chart.draw()),),
        tuple(LegendEntry(one.name, one.style, f"line {one.shape}") for one in drawn),
        notes=(f"{_join(broken)}: the loss is not finite at some steps, which are left out.",) if broken else (),
    )


@dataclass(frozen=True)
class _Clock:
    unit: str
    seconds: float


def _clock_for(longest: float) -> _Clock:
    """The unit in which so many seconds are readable."""
    if longest < 180:
        return _Clock("s", 1.0)
    return _Clock("min", 60.0) if longest < 3 * 3600 else _Clock("h", 3600.0)


def _legend_of(runs: Sequence[Shown], swatch: str) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(one.name, one.style, swatch) for one in runs)


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _format_step(step: float) -> str:
    return f"step {step:,.0f}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _four_digits(value: float) -> str:
    return f"{value:.4g}"
