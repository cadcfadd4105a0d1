"""`mpc-dist plan`: from a model and a GPU's memory to a horizon, a number of GPUs and a partition."""

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mpc_dist.new_folder import writable_folder
from mpc_dist.planner.objective import NAMES
from mpc_dist.planner.request import Request
from mpc_dist.report.plan import PlanReport
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.planning import Probe, plan_for
from mpc_dist.training.trial import run_trials

SUMMARY = "Choose a horizon, a number of GPUs and a partition."
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def parse_bytes(text: str) -> float:
    """A size such as 24GiB, 500MB or 1e9."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?b?)\s*", text.lower())
    unit = match[2].upper().removesuffix("B") + ("B" if match[2] else "") if match else "?"
    if match is None or unit not in UNITS:
        raise ValueError(f"{text!r} is no size; write e.g. 24GiB, 500MB or 1e9")
    return float(match[1]) * UNITS[unit]


def _add_options(add: Callable[..., object]) -> None:
    add("--gpu-memory", type=str, default="", help="Memory of one GPU (M0), e.g. 24GiB; it must be given.")
    add("--max-gpus", type=int, default=8, help="Most GPUs to use.")
    add("--objective", type=str, default="time", help=f"{', '.join(NAMES)}, or a function's dotted path.")
    add("--cost", type=str, default="ladder", help="ladder, linear, or a function's dotted path.")
    add("--eps", type=float, default=0.1, help="O1: the quality may fall short of back-propagation's by this.")
    add("--lambda", dest="weight", type=float, default=0.1, help="O2: the weight of the cost.")
    add("--price", type=float, default=1.0, help="Of one GPU: in the cost, and per second for money.")
    add("--layout", type=str, default=None, help="A partition by hand, e.g. 4|4|6|2.")
    add("--latency", type=float, default=1e-4, help="Seconds per message between ranks.")
    add("--bandwidth", type=str, default="1.5GB", help="Of a link, per second.")
    add("--exact", action="store_true", help="Measure every horizon instead of at most six.")
    add("--batches", type=int, default=4, help="Batches for the angle.")
    add("--tflops", type=float, default=None, help="Plan without allocating the model, for a GPU of this speed.")
    add("--angles-file", type=str, default=None, help="An angle profile to use; its blocks must divide the model's.")
    add("--trial", type=int, default=0, help="Train the finalists for so many steps and rank by what they learnt.")
    add("--profiles", type=str, default="runs/profiles", help="Folder of kept profiles.")
    add("--out", type=str, default="runs/plan/plan.yaml", help="File for the plan; the figure goes beside it.")


def _without_own_options(argv: Sequence[str]) -> list[str]:
    """The words that say the configuration, in order: what a run of the plan must be given, too."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_options(own.add_argument)
    return own.parse_known_args(argv)[1]


def run(argv: Sequence[str]) -> None:
    """Measure, choose, print the table, write the plan and the figure."""
    parser = ConfigParser(argv, prog="mpc-dist plan", description=SUMMARY)
    _add_options(parser.parser.add_argument)
    config, options = parser.parse()
    if not options.gpu_memory:
        raise ValueError("say how much memory one GPU has, e.g. --gpu-memory 24GiB")
    request = Request(
        gpu_memory=parse_bytes(options.gpu_memory),
        max_gpus=options.max_gpus,
        objective=options.objective,
        cost=options.cost,
        epsilon=options.eps,
        weight=options.weight,
        price=options.price,
        latency=options.latency,
        bandwidth=parse_bytes(options.bandwidth),
        layout=options.layout,
        num_replicas=config.data_parallel.degree,
    )
    probe = Probe(
        exact=options.exact,
        num_batches=options.batches,
        profiles=Path(options.profiles),
        fake_tflops=options.tflops,
        angles_file=None if options.angles_file is None else Path(options.angles_file),
    )
    console, out = Console() if Console().is_terminal else Console(width=130), Path(options.out)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with writable_folder(out.parent), Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        planned = plan_for(config, request, probe, report=report)
        if options.trial:
            planned = run_trials(config, planned, num_steps=options.trial, report=report)
    shown = PlanReport(planned)
    console.print(shown.table())
    for line in shown.lines():
        console.print(line, highlight=False, soft_wrap=True)
    planned.plan.write(out)
    picture = out.with_suffix(".png")
    shown.figure().savefig(picture, dpi=150)
    console.print(f"plan: {out}\nfigure: {picture}", highlight=False, soft_wrap=True)
    command = ["launch/train.py", *_without_own_options(argv), "--plan", str(out)]
    gpus = planned.plan.chosen.num_gpus * config.data_parallel.degree
    console.print(
        f"run it: torchrun --standalone --nproc-per-node {gpus} {shlex.join(command)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
