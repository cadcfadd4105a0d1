"""`mpc-dist demo`: train one model with horizon 1 and with back-propagation, and show both."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mpc_dist.report.replay import Replay, replay
from mpc_dist.report.run import Run, read_run
from mpc_dist.report.timeline import draw_figure
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.schedule import Interval
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.job import train
from mpc_dist.training.run_lock import lock_run
from mpc_dist.training.sections import CheckpointsConfig, HorizonConfig

SUMMARY = "Train on local ranks with horizon 1 and with back-propagation, side by side."


def run(argv: Sequence[str]) -> None:
    """Train twice, print the comparison and draw the timelines."""
    parser = ConfigParser(argv, prog="mpc-dist demo", description=SUMMARY)
    parser.parser.add_argument("--out", type=str, default="runs/demo/train", help="Folder for metrics and the figure.")
    config, options = parser.parse()
    folder, console = Path(options.out), Console()
    folder.mkdir(parents=True, exist_ok=True)
    horizons = {"h = 1 stage": HorizonConfig("sliding", 1, "stages"), "back-propagation": HorizonConfig("backprop")}
    runs = {}
    for name, horizon in horizons.items():
        place = folder / ("horizon1" if horizon.windows == "sliding" else "backprop")
        training = replace(config.training, folder=str(place), log_every=1)
        chosen = replace(config, horizon=horizon, training=training, checkpoints=CheckpointsConfig(every=0))
        with console.status(f"{name}: training on {config.parallel.stages} ranks"):
            runs[name] = _train(chosen)
    replays = {name: replay(found) for name, found in runs.items()}
    console.print(_table(config, runs, replays))
    charts: dict[str, Sequence[Sequence[Interval]]] = {}
    for name, found in replays.items():
        charts[f"{name}, measured: {1000 * found.measured_seconds:.1f} ms, step {found.step}"] = [
            row.intervals for row in found.measured
        ]
        charts[f"{name}, simulated: {1000 * found.simulated_seconds:.1f} ms per step"] = [
            row.intervals for row in found.simulated
        ]
    draw_figure(charts, unit="seconds").savefig(folder / "timelines.png", dpi=150)
    console.print(f"figure: {folder / 'timelines.png'}", highlight=False, soft_wrap=True)


def _train(config: Config) -> Run:
    folder = Path(config.training.folder)
    with lock_run(folder):
        run_local_ranks(_train_rank, config.num_ranks, config, timeout=600.0)
    return read_run(folder)


def _train_rank(rank: int, config: Config) -> None:
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)


def _table(config: Config, runs: dict[str, Run], replays: dict[str, Replay]) -> Table:
    values = config.as_dict()
    table = Table(
        title=f"{values['model']['name']}, {config.model.num_blocks} blocks on {config.parallel.stages} ranks, "
        f"{config.parallel.microbatches} micro-batches, {config.training.steps} steps",
        caption="MiB held: most bytes kept for backward, by rank; simulated: from the measured times of the actions",
    )
    for heading in ("", "ms/step", "simulated", "MiB held", "train loss", "test loss"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{1000 * (run.step_seconds or 0):.1f}",
            f"{1000 * replays[name].simulated_seconds:.1f}",
            ", ".join(f"{(rank.live_bytes or 0) / 2**20:.2f}" for rank in run.ranks),
            f"{run.train_losses[-1].value:.4f}",
            f"{run.test_losses[-1].value:.4f}",
        )
    return table
