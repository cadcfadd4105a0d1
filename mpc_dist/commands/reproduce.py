"""`mpc-dist reproduce`: the paper's results and our own studies, each by one command."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mpc_dist.study import angle, memory, theory_findings
from mpc_dist.study.cell import Store
from mpc_dist.study.experiment import Experiment, Findings, write_page
from mpc_dist.study.finetune import FINETUNE
from mpc_dist.study.horizons import HORIZONS
from mpc_dist.study.index import write_index
from mpc_dist.study.readouts import READOUTS
from mpc_dist.study.runner import collect, run_cells
from mpc_dist.study.selection import SELECTION
from mpc_dist.study.when_to_use import WHEN_TO_USE
from mpc_dist.study.windows import WINDOWS
from mpc_dist.validation import check_whole, look_up

SUMMARY = "Reproduce the paper's results and the studies in docs/: every figure, table and verdict."
ALL = "all"

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        angle.EXPERIMENT,
        memory.EXPERIMENT,
        theory_findings.EXPERIMENT,
        HORIZONS,
        SELECTION,
        READOUTS,
        WINDOWS,
        WHEN_TO_USE,
        FINETUNE,
    )
}


def run(argv: Sequence[str]) -> None:
    """Run one experiment, or all of them, and write their pages."""
    options = _parse(argv)
    check_whole("--jobs", options.jobs, minimum=1)
    chosen = (
        dict(EXPERIMENTS) if options.name == ALL else {options.name: look_up("experiment", options.name, EXPERIMENTS)}
    )
    console = Console()
    out = Path(options.out or ("runs/reproduce-quick" if options.quick else "runs/reproduce"))
    for name, experiment in chosen.items():
        missing = [path for path in experiment.needs if not Path(path).exists()]
        if missing and options.name != ALL:
            raise ValueError(f"{name} needs {', '.join(missing)}; `make data` and docs/paper/data.md say how")
        if missing:
            console.print(f"{name}: left out, it needs {', '.join(missing)}", highlight=False)
            continue
        _reproduce(experiment, out / name, options, console)
    found = _conclude_all(out, is_quick=options.quick)
    if any(not EXPERIMENTS[name].page_beside for name in found):
        console.print(f"all results: {write_index(found, EXPERIMENTS, out)}", highlight=False, soft_wrap=True)


def _reproduce(experiment: Experiment, folder: Path, options: argparse.Namespace, console: Console) -> None:
    """Run what is missing and write the page, if there is enough to conclude from."""
    cells = experiment.build_cells(options.quick)
    store = Store(folder / "cells.jsonl")
    if options.page_only:
        records = collect(cells, store)
    else:
        records = run_cells(cells, store, num_workers=options.jobs, title=experiment.name, console=console)
        store.keep_only(cells)
    if len(records) < len(cells):
        console.print(f"{experiment.name}: {len(records)} of {len(cells)} runs are done; no page yet", highlight=False)
        return
    findings = experiment.conclude(records)
    page = write_page(experiment, findings, records, folder, quick=options.quick)
    for verdict in findings.verdicts:
        console.print(f"{verdict.verdict}: {verdict.claim} ({verdict.evidence})", highlight=False, markup=False)
    console.print(f"{experiment.name}: {page}", highlight=False, soft_wrap=True)


def _conclude_all(out: Path, *, is_quick: bool) -> dict[str, Findings]:
    """What the experiments say that are complete in this folder."""
    found = {}
    for name, experiment in EXPERIMENTS.items():
        cells = experiment.build_cells(is_quick)
        records = collect(cells, Store(out / name / "cells.jsonl"))
        if len(records) == len(cells):
            found[name] = experiment.conclude(records)
    return found


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(f"  {name:10} {experiment.title}" for name, experiment in EXPERIMENTS.items())
    parser = argparse.ArgumentParser(
        prog="mpc-dist reproduce",
        description=f"{SUMMARY}\n\nInterrupt it at any time: the same command goes on. The experiments:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help=f"an experiment, or '{ALL}'")
    parser.add_argument("--quick", action="store_true", help="small sizes, minutes instead of hours; other numbers")
    parser.add_argument("--out", help="results folder (default: runs/reproduce, or runs/reproduce-quick)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each (default: 2)")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the pages of what was run")
    return parser.parse_args(argv)
