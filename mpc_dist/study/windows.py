"""Which windows learn, and why: all kinds on several models, beside a linear model of the chain."""

import statistics
from collections.abc import Mapping, Sequence

from mpc_dist.study.cell import Record
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict
from mpc_dist.study.window_figures import draw_drift, draw_losses, draw_modes, draw_prediction
from mpc_dist.study.window_settings import FULL, MAIN, QUICK, TEXT, build_cells
from mpc_dist.study.window_verdicts import (
    Outcome,
    Outcomes,
    judge_angle,
    judge_cause,
    judge_damping,
    judge_near,
    judge_paper,
    judge_prediction,
    judge_trial,
    judge_units,
    read_outcome,
)

MODES = "modes of "


def conclude(records: Records) -> Findings:
    """Tables, figures and verdicts."""
    outcomes: dict[str, dict[str, Outcome]] = {}
    modes: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        place, _, windows = name.partition(": ")
        if place.startswith(MODES):
            modes.setdefault(place.removeprefix(MODES), {})[windows] = record
        else:
            outcomes.setdefault(place, {})[windows] = read_outcome(record)
    main = {name.partition(": ")[2]: record for name, record in records.items() if name.startswith(f"{MAIN}: ")}
    predicted = {w: statistics.fmean(record.result["drift"]) for w, record in modes["8"].items()}
    measured = {w: outcome.mean for w, outcome in outcomes[MAIN].items()}
    verdicts = (
        judge_trial(outcomes),
        judge_paper(outcomes),
        judge_angle(main, outcomes[MAIN]),
        judge_cause(modes),
        judge_prediction(predicted, measured),
        judge_near(outcomes[MAIN]),
        judge_damping(outcomes),
        judge_units(outcomes),
    )
    sizes = {w: _size(record) for w, record in main.items()}
    seeds = len(next(iter(main.values())).result["runs"])
    small = (
        f"GPT with 8 blocks of width {next(iter(main.values())).cell['training']['model']['width']}, AdamW, local heads"
    )
    pictures = (
        Picture(
            "losses",
            draw_losses({s: {w: o.mean for w, o in of.items()} for s, of in outcomes.items()}),
            f"Test loss after training, divided by that of h = 1, in every setting; mean of {seeds} seeds, each at the "
            "best of its learning rates. Left of the line is better than h = 1; ratios beyond are at the edge.",
        ),
        Picture(
            "drift",
            draw_drift({w: record.result["runs"] for w, record in main.items()}),
            f"What happens inside: {small}, mean of {seeds} seeds. Left: the largest root mean square of any state. "
            "Right: cos(theta_h) of each horizon's gradient at the end of training with some windows.",
        ),
        Picture(
            "modes",
            draw_modes({depth: {w: r.result for w, r in of.items()} for depth, of in modes.items()}),
            "The linear model. Left: the longest Jordan chain at eigenvalue 0, along which errors are not damped. "
            "Right: size of the errors after 1,000 steps with gradient noise, mean over draws of unlike kernels.",
        ),
        Picture(
            "prediction",
            draw_prediction(predicted, measured),
            f"Errors that the linear model of 8 blocks predicts, against the test loss measured: "
            f"{small}, mean of {seeds} seeds.",
        ),
    )
    return Findings(
        summary=_summarise(outcomes, verdicts),
        tables=(_loss_table(outcomes), _rate_table(outcomes), _mode_table(modes), _inside_table(sizes, outcomes[MAIN])),
        pictures=pictures,
        verdicts=verdicts,
        notes=_notes(records),
    )


def _summarise(outcomes: Outcomes, verdicts: Sequence[Verdict]) -> str:
    """The sentences that the numbers give."""
    wins: dict[str, int] = {}
    compared = 0
    for of in outcomes.values():
        cheap = {w: o for w, o in of.items() if w in ("sliding 1", "sliding 2", "tumbling 2")}
        if len(cheap) == 3:
            best = min(cheap, key=lambda w: cheap[w].mean)
            wins[best] = wins.get(best, 0) + 1
            compared += 1
    ranking = ", ".join(f"{w} {n}" for w, n in sorted(wins.items(), key=lambda item: -item[1]))
    lines = [f"Best of sliding 1, sliding 2 and tumbling 2, in {compared} settings: {ranking}."]
    paper, near, prediction = verdicts[1], verdicts[5], verdicts[4]
    lines.append(f"That a larger horizon trains better is {paper.verdict}: {paper.evidence.partition('. ')[0]}.")
    lines.append(
        "The cause that we propose: under sliding windows no block answers for its own output. In a linear model of "
        "the chain, errors of neighbouring boundaries then cancel in what moves the blocks, are damped by none, and "
        f"grow with the noise of training. As an account of how training ranks the windows it is {prediction.verdict} "
        f"({prediction.evidence}); that adding the near loss mends it is {near.verdict}."
    )
    return " ".join(lines)


def _columns(outcomes: Outcomes) -> list[str]:
    return list(dict.fromkeys(windows for of in outcomes.values() for windows in of))


def _loss_table(outcomes: Outcomes) -> Table:
    columns = _columns(outcomes)
    rows = []
    for setting, of in outcomes.items():
        best = min(of.values(), key=lambda outcome: outcome.mean)
        cells = [f"**{of[w]}**" if w in of and of[w] is best else str(of[w]) if w in of else "" for w in columns]
        rows.append((setting, *cells))
    return Table(
        "Test loss at the last boundary (mean ± standard deviation over seeds)", ("setting", *columns), tuple(rows)
    )


def _rate_table(outcomes: Outcomes) -> Table:
    columns = _columns(outcomes)
    rows = [(s, *(f"{of[w].rate:g}" if w in of else "" for w in columns)) for s, of in outcomes.items()]
    return Table("Learning rate chosen", ("setting", *columns), tuple(rows))


def _mode_table(modes: Mapping[str, Mapping[str, Record]]) -> Table:
    rows = []
    for depth, of in modes.items():
        for windows, record in of.items():
            result = record.result
            least, drift = statistics.fmean(result["least"]), statistics.fmean(result["drift"])
            rows.append((depth, windows, str(result["chain"]), f"{least:.4f}", f"{drift:.3g}"))
    columns = (
        "blocks",
        "windows",
        "longest chain at 0",
        "least damping / largest, unlike kernels",
        "error under noise",
    )
    return Table("Modes of the linear model", columns, tuple(rows))


def _size(record: Record) -> float:
    """The largest state at the end, mean over the seeds."""
    return statistics.fmean(max(list(run["interior"].values())[-1]["sizes"]) for run in record.result["runs"])


def _inside_table(sizes: Mapping[str, float], of: Mapping[str, Outcome]) -> Table:
    rows = tuple((windows, str(of[windows]), f"{size:.3g}") for windows, size in sizes.items())
    return Table(
        f"Inside the chain at the end: {MAIN}", ("windows", "test loss", "largest state (root mean square)"), rows
    )


def _notes(records: Records) -> tuple[str, ...]:
    cells = {name.partition(": ")[0]: r.cell for name, r in records.items() if not name.startswith(MODES)}
    sizes = "; ".join(
        f"{name}: {c['training']['steps']} steps of {c['training']['batch_size']} samples, "
        f"rates {', '.join(f'{x:g}' for x in c['rates'])}"
        for name, c in cells.items()
    )
    seeds = next(iter(cells.values()))["seeds"]
    return (
        f"Seeds {', '.join(map(str, seeds))}; where several rates are listed, the best after half the steps "
        "on another seed is taken.",
        f"{sizes}.",
        "GPT: tiny Shakespeare by characters, context 32. Residual MLP (width 32): the paper's trigonometric task, "
        "20,000 samples. ResNet (4, 8 and 16 channels): scikit-learn's digits; its depths are "
        "the multiples of 3 near 8 and 16.",
        "A shared head needs states of one width, which here only the GPT has. SGD has momentum 0.9.",
        "The linear model leaves out what heads learn, momentum and Adam's scaling.",
    )


WINDOWS = Experiment(
    name="windows",
    title="Which windows learn, and why",
    build_cells=lambda quick: build_cells(QUICK if quick else FULL),
    conclude=conclude,
    needs=(str(TEXT.path),),
)
