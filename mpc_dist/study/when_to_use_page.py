"""The words, tables and verdicts of the page on when to use horizon training, each sentence chosen by the numbers."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from mpc_dist.report.angles import format_bytes
from mpc_dist.study.cell import Record, Result
from mpc_dist.study.experiment import Findings, Picture, Table, Verdict, VerdictWord
from mpc_dist.study.outcome import TAIL, TARGET_AT, Panel, Win, find_wins
from mpc_dist.study.price_cell import OVERHEADS, torch_ratio
from mpc_dist.study.stage_cells import COSINE
from mpc_dist.study.standing import LEAST_DIFFERENCE, MARGIN, SPREADS, is_sooner, stand
from mpc_dist.study.when_to_use_figures import draw_quality, draw_times, draw_wins
from mpc_dist.study.when_to_use_summary import summarise, unlimited

ENOUGH = 8
"""Micro-batches at which memory is compared: as many as stages, the least at which 1F1B keeps every rank busy."""


def write_findings(panels: Sequence[Panel], calibration: Record, overhead: float) -> Findings:
    """The page of these problems."""
    shown = _choose_microbatches(panels)
    return Findings(
        summary=_summarise(panels, shown),
        tables=(
            _rules_by_microbatches(panels),
            *(
                table
                for panel in panels
                for table in (_qualities(panel, shown), _gaps(panel), _step_times(panel), _times(panel))
            ),
            _calibration(calibration, overhead),
        ),
        pictures=(
            Picture(
                "quality", draw_quality(panels, shown), _caption(panels, "Test loss at the end against bytes held")
            ),
            Picture("times", draw_times(panels), _caption(panels, "Time to the target loss against micro-batches")),
            Picture("wins", draw_wins(panels), _caption(panels, "The fastest to the target, by memory of a rank")),
        ),
        verdicts=tuple(_judge(panels, shown)),
        notes=_notes(panels, calibration, overhead),
    )


def _choose_microbatches(panels: Sequence[Panel]) -> int:
    counts = panels[0].microbatches
    return ENOUGH if ENOUGH in counts else counts[-1]


def _caption(panels: Sequence[Panel], what: str) -> str:
    sizes = "; ".join(
        f"{panel.problem}: {panel.cell['steps']} steps of {panel.cell['batch_size']} samples, "
        f"seeds {', '.join(map(str, panel.cell['seeds']))}"
        for panel in panels
    )
    return f"{what}, on {panels[0].cell['num_stages']} stages ({sizes}; times simulated)"


# -------------------------------------------------------------------------------------------------------- the tables


def _summarise(panels: Sequence[Panel], shown: int) -> str:
    units = (
        "Times are in forwards of a stage and batch; M is the number of micro-batches of that same batch; shares of "
        f"memory are of what 1F1B holds with M = {shown}."
    )
    return "\n\n".join([summarise(panels), "## When to use what", units, _rules(panels, shown).as_markdown()])


def _rules(panels: Sequence[Panel], shown: int) -> Table:
    rows = []
    for panel in panels:
        merged = _merge(find_wins(panel.outcomes, panel.microbatches))
        for system, group in groupby(merged, key=lambda one: one[0].choice.outcome.system):
            held = list(group)
            (first, _, _), (last, _, until) = held[0], held[-1]
            counts = list(dict.fromkeys(win.choice.num_microbatches for win, _, _ in held))
            use = f"{system} with M = {', '.join(map(str, counts))}"
            share = first.from_bytes / panel.backprop.steps[shown].live_bytes
            memory = f"{format_bytes(first.from_bytes)} ({share:.0%}) {until}"
            when = f"test loss {panel.target:.3f} is wanted soonest, and a rank can hold {memory} for backward"
            rows.append((panel.problem, use, when, _gain(last)))
        rows.append((panel.problem, *_rule_for_quality(panel)))
    return Table("What to use, if M is yours to choose", ("model", "use", "when", "because"), tuple(rows))


def _rule_for_quality(panel: Panel) -> tuple[str, str, str]:
    backprop, best = panel.backprop, panel.best_window
    use = {
        "better": best.system,
        "as good": f"back-propagation or {best.system}",
        "not distinguished": f"back-propagation; {best.system} is not distinguished from it",
        "worse": "back-propagation",
    }[stand(best, backprop)]
    losses = f"{backprop.learnt.loss:.3f} by back-propagation, {best.learnt.loss:.3f} by {best.system}"
    return use, f"the lowest test loss after {panel.cell['steps']} steps is wanted", losses


def _rules_by_microbatches(panels: Sequence[Panel]) -> Table:
    rows = [
        (panel.problem, str(m), f"{memory} {until}", win.choice.outcome.system, _gain(win))
        for panel in panels
        for m in panel.microbatches
        for win, memory, until in _merge(find_wins(panel.outcomes, [m]))
    ]
    columns = ("model", "M", "a rank can hold for backward", "use", "because")
    return Table("What is at the target soonest, if M is given", columns, tuple(rows))


def _merge(wins: Sequence[Win]) -> Iterable[tuple[Win, str, str]]:
    """Winners, from and up to which memory; where only the rival changes, that in the least memory is kept."""
    kept = [win for index, win in enumerate(wins) if not index or wins[index - 1].choice != win.choice]
    for win, following in zip(kept, [*kept[1:], None], strict=True):
        until = "or more" if following is None else f"up to {format_bytes(following.from_bytes)}"
        yield win, format_bytes(win.from_bytes), until


def _gain(win: Win) -> str:
    """How much sooner it is than back-propagation in the same memory."""
    if win.choice.outcome.is_backprop:
        return f"no window is sooner than its {win.choice.time:.0f}"
    if win.rival is None:
        return f"{win.choice.time:.0f}; no back-propagation fits"
    rival = f"{win.rival.outcome.system} with M = {win.rival.num_microbatches}"
    overlap = "" if is_sooner(win.choice, win.rival) else "; the seeds overlap"
    return f"{win.choice.time:.0f} against {win.rival.time:.0f} of {rival}{overlap}"


def _qualities(panel: Panel, shown: int) -> Table:
    rows = []
    for one in panel.outcomes:
        learnt, step = one.learnt, one.steps.get(shown)
        rows.append(
            (
                one.system,
                f"{learnt.rate:g}",
                f"{learnt.loss:.3f} ± {learnt.spread:.3f}",
                "" if learnt.accuracy is None else f"{learnt.accuracy:.1%}",
                "never" if one.steps_to_target is None else f"{one.steps_to_target:.0f}",
                "" if step is None else format_bytes(step.live_bytes),
                "" if step is None else format_bytes(step.rank_bytes),
            )
        )
    columns = ("system", "learning rate", "test loss", "accuracy", f"steps to {panel.target:.3f}")
    bytes_at = (f"held for backward, M = {shown}", f"all of a rank, M = {shown}")
    return Table(f"{panel.problem}: quality, and bytes of the fullest rank", (*columns, *bytes_at), tuple(rows))


def _gaps(panel: Panel) -> Table:
    """Whether windows fall behind as training goes on, which short runs hide."""
    usual = panel.backprop.learnt.quarters
    rows = [
        (one.system, *(f"{one.learnt.quarters[quarter] - loss:+.3f}" for quarter, loss in usual.items()))
        for one in panel.windows
    ]
    columns = ("system", *(f"quarter {quarter}" for quarter in usual))
    title = f"{panel.problem}: test loss above back-propagation's, mean over each quarter of training"
    return Table(title, columns, tuple(rows))


def _step_times(panel: Panel) -> Table:
    rows = [
        (one.system, *(f"{one.steps[m].time:.2f}" if m in one.steps else "" for m in panel.microbatches))
        for one in panel.outcomes
    ]
    columns = ("system", *(f"M = {m}" for m in panel.microbatches))
    return Table(f"{panel.problem}: time of a step, in forwards of a stage and batch", columns, tuple(rows))


def _times(panel: Panel) -> Table:
    rows = [
        (one.system, *(f"{one.times[m]:.0f}" if m in one.times else "never" for m in panel.microbatches))
        for one in panel.outcomes
    ]
    columns = ("system", *(f"M = {m}" for m in panel.microbatches))
    title = f"{panel.problem}: time to test loss {panel.target:.3f}, in forwards of a stage and batch"
    return Table(title, columns, tuple(rows))


def _calibration(calibration: Record, overhead: float) -> Table:
    rows = []
    for row in calibration.result["rows"]:
        excess = f"{1e3 * row['overhead']:.2f}" if "overhead" in row else ""
        rows.append(
            (
                row["system"],
                row["windows"] + (", split" if row["split"] else ""),
                str(row["microbatches"]),
                f"{1e3 * row['seconds']:.1f}",
                f"{1e3 * row['simulated']:.1f}" if "simulated" in row else "",
                excess,
            )
        )
    columns = ("system", "windows", "M", "measured ms", "simulated ms", "ms over per action")
    title = f"Calibration: {calibration.cell['num_stages']} ranks, emulated compute; {1e3 * overhead:.2f} ms taken"
    return Table(title, columns, tuple(rows))


# ------------------------------------------------------------------------------------------------ verdicts and notes


def _judge(panels: Sequence[Panel], shown: int) -> Iterable[Verdict]:
    pairs = [(panel, panel.find("h = 1"), panel.find(name)) for panel in panels for name in ("h = 2", "h = 3")]
    yield Verdict(
        "Sliding windows with 1 < h < T learn better than h = 1: their gradient is closer (the paper's picture)",
        _grade([stand(wide, local) == "better" for _, local, wide in pairs]),
        "; ".join(f"{p.problem}: {w.system} {w.learnt.loss:.3f}, h = 1 {one.learnt.loss:.3f}" for p, one, w in pairs),
    )
    yield Verdict(
        "Some windows end as well as back-propagation after the same steps",
        _grade([stand(panel.best_window, panel.backprop) in ("better", "as good") for panel in panels]),
        "; ".join(
            f"{panel.problem}: {panel.best_window.system} {panel.best_window.learnt.loss:.3f} ± "
            f"{panel.best_window.learnt.spread:.3f}, back-propagation {panel.backprop.learnt.loss:.3f} ± "
            f"{panel.backprop.learnt.spread:.3f}"
            for panel in panels
        ),
    )
    wins = [(panel, m, unlimited(panel, m)) for panel in panels for m in panel.microbatches]
    yield Verdict(
        "Horizon training is at the target before every back-propagation schedule: no rank waits for the pipe's end",
        _grade([win is not None and _is_windows_in_every_seed(win) for _, _, win in wins]),
        "; ".join(f"{p.problem}, M = {m}: {win.choice.outcome.system}" for p, m, win in wins if win is not None),
    )
    held = [
        (panel, panel.find("h = 1").steps[shown], panel.find("1F1B, checkpointing").steps[shown]) for panel in panels
    ]
    yield Verdict(
        f"h = 1 holds less for backward than 1F1B with checkpointing (M = {shown})",
        _grade([local.live_bytes < rival.live_bytes for _, local, rival in held]),
        "; ".join(
            f"{p.problem}: {format_bytes(one.live_bytes)} and {format_bytes(two.live_bytes)}" for p, one, two in held
        ),
    )


def _is_windows_in_every_seed(win: Win) -> bool:
    return not win.choice.outcome.is_backprop and (win.rival is None or is_sooner(win.choice, win.rival))


def _grade(found: Sequence[bool]) -> VerdictWord:
    """All, some or none."""
    if all(found):
        return "confirmed"
    return "confirmed with limits" if any(found) else "not confirmed"


def _notes(panels: Sequence[Panel], calibration: Record, overhead: float) -> tuple[str, ...]:
    notes = []
    for panel in panels:
        cell = panel.cell
        rates = ", ".join(f"{rate:g}" for rate in cell["rates"])
        decay = "falling as a cosine to 0" if cell["optimizer"]["scheduler"] == COSINE else "constant"
        notes.append(
            f"{panel.problem}: from scratch, model {_list(cell['model'])}; data {_list(cell['data'])}; "
            f"{cell['optimizer']['name']}, batches of {cell['batch_size']}, {cell['steps']} steps, seeds "
            f"{', '.join(map(str, cell['seeds']))}; learning rate of {rates}, the one with the lowest test loss "
            f"after {cell['tuning_steps']} steps of another seed, {decay} over the steps of a run."
        )
        if edge := _at_the_edge(panel):
            notes.append(f"{panel.problem}: the rate is at the edge of the grid, a better one may lie beyond: {edge}.")
        notes.append(
            f"{panel.problem}: reading a loss costs {panel.readout_share:.2g} of an average stage's forward, "
            "and counts in every time."
        )
    counts = sorted({row["microbatches"] for row in calibration.result["rows"]})
    ratios = {m: torch_ratio(calibration.result, m) for m in counts}
    torch = ", ".join(f"{ratio:.2f} (M = {m})" for m, ratio in ratios.items() if ratio is not None) or "not measured"
    return (
        *notes,
        f"The target is the test loss that back-propagation has after {TARGET_AT:.0%} of its steps (seeds' mean, "
        f"lowest so far); quality is the mean over the last {TAIL:.0%} of the evaluations. A loss is better or worse "
        f"than back-propagation's if they are {SPREADS:g} standard deviations over seeds and {LEAST_DIFFERENCE:.1%} "
        f"apart; as good if it is at most {MARGIN:.0%} above, two standard errors included; else not distinguished. A "
        "time is less than another if that of every seed is.",
        "Runs are short. Where a gap grows from quarter to quarter of training, expect a larger one after more steps "
        "than at the end of these.",
        "The batch is fixed: with M micro-batches each is 1/M of it. All runs were trained with M = 1; the gradient "
        "does not depend on M, but for batch norm, which normalises each micro-batch.",
        "Step times are simulated from counted operations, an average stage's forward of the batch being "
        f"{1e3 * panels[0].price['stage_seconds']:g} ms, with {1e3 * panels[0].price['latency']:g} ms per message and "
        f"{1e3 * overhead:.2f} ms per action: the median by which steps on {calibration.cell['num_stages']} gloo ranks "
        f"took longer than simulated (table Calibration), at most {1e3 * OVERHEADS[-1]:g} ms: more is a busy "
        "machine's, and calls for another run. The optimizer's step is not counted.",
        "The rows of torch's zero-bubble schedules are our split schedule's times what the faster of "
        f"InterleavedZeroBubble and ZBV took on those ranks against ours: {torch}, interpolated between; their "
        "bytes are ours, not theirs.",
        "Windows count stages. `anchored 2` looks at least 2 stages ahead and reads every second stage; `adaptive` "
        "doubles tumbling windows from 1 stage on, pays a step of back-propagation for each decision, "
        "and its bytes are the most it came to.",
    )


def _at_the_edge(panel: Panel) -> str:
    """The ways to learn whose rate is the lowest or the highest of several."""
    rates = panel.cell["rates"]
    found = {"back-propagation": panel.backprop.learnt.rate} | {one.system: one.learnt.rate for one in panel.windows}
    edges = (min(rates), max(rates)) if len(rates) > 1 else ()
    return ", ".join(f"{name} ({rate:g})" for name, rate in found.items() if rate in edges)


def _list(values: Result) -> str:
    """The settings that mean something: `weights` are of a checkpoint, `source` is a table of its own."""
    return ", ".join(
        f"{name} {value}" for name, value in values.items() if value is not None and name not in ("source", "weights")
    )
