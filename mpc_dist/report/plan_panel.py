"""The plan of a run from its file: what was considered, and what was predicted beside what then happened."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from mpc_dist.planner.plan import Candidate, Plan
from mpc_dist.report.angles import byte_unit, format_bytes
from mpc_dist.report.panel import Drawing, LegendEntry, Panel, Shown, format_percent
from mpc_dist.report.plan import format_seconds
from mpc_dist.report.run import Run
from mpc_dist.report.svg import Scale, add, draw_mark, picture

WIDTH = 1160.0
ROW = 27.0
LABELS = 250.0
MAX_KINDS = 14
MAX_STAGES = 8


MAX_ROOM = 3.0
"""The limit is drawn unless it is so many times the largest value: the bars would be hard to tell apart."""


@dataclass(frozen=True)
class _Column:
    """A bar for every candidate."""

    heading: str
    values: tuple[float, ...]
    form: str
    """How a value is written."""
    limit: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A prediction and what became of it."""

    name: str
    predicted: float
    measured: float | None
    write: Callable[[float], str]


def plan_panel(runs: Sequence[Shown]) -> Panel:
    """The candidates of every planned run, and how well the prediction held."""
    title = "Plan"
    planned = [one for one in runs if one.run.plan is not None]
    reasons: dict[str, list[str]] = {}
    for one in runs:
        if one.run.plan is None:
            reasons.setdefault(_why_no_plan(one.run), []).append(one.name)
    notes = [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]
    if not planned:
        return Panel("plan", title, "", missing=" ".join(notes), is_wide=True)
    drawings: list[Drawing] = []
    for one in planned:
        plan = one.run.plan
        assert plan is not None
        drawings.append(Drawing(_draw_candidates(plan, one.style), one.name, one.style, _describe(plan)))
        drawings.append(
            Drawing(
                _draw_outcome(one.run, plan, one.style), "", one.style, "Predicted (outlined) and measured (solid)."
            )
        )
    return Panel(
        "plan",
        title,
        "The best candidate of each kind, best first: the objective, which was minimised, the predicted step time and "
        "the predicted bytes of the fullest rank. Below it what was predicted for the choice beside what was measured.",
        tuple(drawings),
        (
            LegendEntry("chosen", planned[0].style if len(planned) == 1 else "plain", "diamond"),
            LegendEntry("other candidates", "muted", "box"),
            LegendEntry("memory of one GPU (M0)", "limit", "line"),
        ),
        notes=tuple(notes),
        is_wide=True,
    )


def _why_no_plan(run: Run) -> str:
    if (run.folder / "plan.yaml").exists():
        return "its plan.yaml cannot be read, see the run's notes above"
    if run.config["horizon"]["mode"] == "adaptive":
        return "no plan, trained with an adaptive horizon"
    return "no plan, trained with a fixed horizon"


def _describe(plan: Plan) -> str:
    chosen = plan.chosen
    realised = "none within the limit" if plan.realised_gpus is None else str(plan.realised_gpus)
    return (
        f"{len(plan.candidates)} candidates fit {format_bytes(plan.gpu_memory)} per GPU; objective {plan.objective}. "
        f"Chosen: {chosen.name} on {chosen.num_gpus} GPU{'s' if chosen.num_gpus > 1 else ''}, partition "
        f"{'|'.join(map(str, chosen.partition))}, {chosen.microbatches} micro-batches, predicted bubble "
        f"{format_percent(chosen.bubble)}. Algorithm 1: h* = {plan.horizon}; GPUs for it by the ladder "
        f"{plan.ladder_gpus}, realised {realised}: {plan.why}."
    )


def best_of_each_kind(plan: Plan) -> list[Candidate]:
    """The first candidate of every name, in the plan's order; the chosen one is always among them."""
    best: dict[str, Candidate] = {plan.chosen.name: plan.chosen}
    for one in plan.candidates:
        best.setdefault(one.name, one)
    return list(best.values())[:MAX_KINDS]


def _draw_candidates(plan: Plan, style: str) -> Element:
    kinds = best_of_each_kind(plan)
    svg = picture(WIDTH, 40 + ROW * len(kinds), class_="chart")
    labels, ticks = add(svg, "g", class_="labels"), add(svg, "g", class_="ticks")
    add(labels, "text", "windows", x=24, y=16)
    add(labels, "text", "r^", x=LABELS, y=16, text_anchor="end")
    for row, one in enumerate(kinds):
        middle = 30 + ROW * (row + 0.5)
        is_chosen = one == plan.chosen
        if is_chosen:
            draw_mark(add(svg, "g", class_=f"series {style}"), 10, middle, "diamond", 5)
        name = one.name if len(one.name) <= 30 else f"{one.name[:29]}…"
        add(ticks, "text", name, class_="strong" if is_chosen else "name", x=24, y=middle + 4)
        add(ticks, "text", f"{one.quality:.3f}", x=LABELS, y=middle + 4, text_anchor="end")
    columns = _columns(plan, kinds)
    styles = [style if one == plan.chosen else "muted" for one in kinds]
    width = (WIDTH - LABELS - 24) / len(columns)
    for index, column in enumerate(columns):
        _draw_column(svg, column, styles, start=LABELS + 24 + index * width, width=width - 84)
    return svg


def _columns(plan: Plan, kinds: Sequence[Candidate]) -> list[_Column]:
    unit, size = byte_unit(max(max(one.bytes_per_rank) for one in kinds))
    time_unit, seconds = ("s", 1.0) if max(one.step_seconds for one in kinds) >= 1 else ("ms", 1e-3)
    fullest = tuple(max(one.bytes_per_rank) / size for one in kinds)
    return [
        _Column(f"objective ({plan.objective.rpartition('.')[2]})", tuple(one.value for one in kinds), ".3g"),
        _Column(f"step time ({time_unit})", tuple(one.step_seconds / seconds for one in kinds), ",.3g"),
        _Column(f"fullest rank ({unit})", fullest, ".1f", limit=plan.gpu_memory / size),
    ]


def _draw_column(svg: Element, column: _Column, styles: Sequence[str], *, start: float, width: float) -> None:
    add(add(svg, "g", class_="labels"), "text", column.heading, x=start, y=16)
    ticks = add(svg, "g", class_="ticks")
    finite = [0.0, *(value for value in column.values if math.isfinite(value))]
    low, high = min(finite), max(finite)
    limit = column.limit if column.limit is not None and column.limit <= MAX_ROOM * high else None
    high = max(high, limit or high)
    x = Scale(low, high if high > low else low + 1, start, start + width, (), ())
    for row, (value, style) in enumerate(zip(column.values, styles, strict=True)):
        top = 30 + ROW * row
        shown = value if math.isfinite(value) else 0.0
        left, right = sorted((x(0), x(shown)))
        group = add(svg, "g", class_=f"series {style}")
        add(group, "rect", class_="bar", x=left, y=top + 6, width=max(right - left, 1.5), height=ROW - 12)
        add(ticks, "text", format(value, column.form), x=right + 7, y=top + ROW / 2 + 4)
    if limit is not None:
        line = add(svg, "line", class_="limit", x1=x(limit), x2=x(limit), y1=24, y2=32 + ROW * len(styles))
        add(line, "title", "memory of one GPU")


def _draw_outcome(run: Run, plan: Plan, style: str) -> Element:
    """A pair of bars for each predicted quantity; a pair's longer bar ends at the same place."""
    outcomes = outcomes_of(run, plan)
    svg = picture(WIDTH, 36 + ROW * 1.3 * len(outcomes), class_="chart")
    labels, ticks = add(svg, "g", class_="labels"), add(svg, "g", class_="ticks")
    add(labels, "text", "predicted and measured", x=24, y=16)
    add(labels, "text", "measured / predicted", x=WIDTH - 130, y=16, text_anchor="middle")
    start, end = LABELS + 24, WIDTH - 330
    for row, one in enumerate(outcomes):
        top = 28 + ROW * 1.3 * row
        middle = top + ROW * 0.65
        add(ticks, "text", one.name, class_="name", x=24, y=middle + 4)
        if one.measured is None:
            add(ticks, "text", f"{one.write(one.predicted)} predicted, not measured", x=start, y=middle + 4)
            continue
        x = Scale(0.0, max(one.predicted, one.measured), start, end, (), ())
        group = add(svg, "g", class_=f"series {style}")
        height = ROW * 0.45
        for place, (value, kind) in enumerate(((one.predicted, "bar outlined"), (one.measured, "bar"))):
            y = top + 5 + place * (height + 2)
            add(group, "rect", class_=kind, x=start, y=y, width=x(value) - start, height=height)
        add(ticks, "text", f"{one.write(one.predicted)} → {one.write(one.measured)}", x=end + 14, y=middle + 4)
        add(
            ticks,
            "text",
            f"{one.measured / one.predicted:.2f} x",
            class_="strong",
            x=WIDTH - 130,
            y=middle + 4,
            text_anchor="middle",
        )
    return svg


def outcomes_of(run: Run, plan: Plan) -> list[Outcome]:
    """The step time, and the bytes of each stage; of many stages the fullest."""
    first = {one.stage: one for one in run.ranks if one.replica == 0}
    fullest = sorted(enumerate(plan.chosen.bytes_per_rank), key=lambda pair: -pair[1])[:MAX_STAGES]
    found = [Outcome("step time", plan.chosen.step_seconds, run.step_seconds, format_seconds)]
    for stage, size in sorted(fullest):
        measured = first[stage].rank_bytes if stage in first else None
        found.append(Outcome(f"bytes of stage {stage}", size, measured, format_bytes))
    return found
