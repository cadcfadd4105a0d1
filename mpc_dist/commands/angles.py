"""`mpc-dist angles`: what each horizon does to the gradient and to memory."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpc_dist.data import Batches
from mpc_dist.new_folder import writable_folder
from mpc_dist.profile import fit_line, measure_angles, measure_memory
from mpc_dist.report.angles import HorizonReport
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.planning import build_whole_chain, place
from mpc_dist.windows import sliding

SUMMARY = "Measure what each horizon does to the gradient and to memory."


def run(argv: Sequence[str]) -> None:
    """Measure, print the table, write the figure and the numbers."""
    parser = ConfigParser(argv, prog="mpc-dist angles", description=SUMMARY)
    parser.parser.add_argument(
        "--out",
        type=str,
        default="runs/angles",
        help="Folder for the figure (angles.png) and the numbers (angles.json).",
    )
    config, options = parser.parse()
    folder, console = Path(options.out), Console()

    with writable_folder(folder):
        report = _measure(config, console)
        console.print(report.table())
        picture, numbers = report.write(folder)
    console.print(f"figure: {picture}\nnumbers: {numbers}", highlight=False, soft_wrap=True)


def _measure(config: Config, console: Console) -> HorizonReport:
    data = config.data.load()
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    chain, precision = build_whole_chain(config, data.task), config.training.build_precision()

    measured = [place(batch, config) for batch in islice(batches, config.angles.num_batches)]
    chosen = config.angles.horizons
    horizons = sorted({*(range(1, chain.num_blocks) if chosen is None else chosen), chain.num_blocks})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        angle_bar = progress.add_task("angles (blocks)", total=len(measured) * chain.num_blocks)
        memory_bar = progress.add_task("memory (horizons)", total=len(horizons))
        windows = [sliding(chain.num_blocks, horizon) for horizon in horizons]
        profile = measure_angles(
            chain, measured, windows=windows, precision=precision, advance=lambda: progress.advance(angle_bar)
        )
        held = measure_memory(
            chain, *measured[0], horizons=horizons, precision=precision, advance=lambda: progress.advance(memory_bar)
        )
    size = sum(parameter.numel() for parameter in chain.blocks.parameters())
    values = config.as_dict()
    return HorizonReport(
        title=f"{values['model']['name']} ({chain.num_blocks} blocks, {size:,} parameters) on "
        f"{values['data']['name']}, {config.readout.kind} readouts, batch {config.batch_size}",
        horizons=np.array(horizons),
        cosines=np.array([profile.cosine(one) for one in windows]),
        peak_bytes=np.array(list(held.values())),
        memory_fit=fit_line(held),
        config=values,
    )
