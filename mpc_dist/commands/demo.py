"""`mpc-dist demo`: train one model with horizon 1 and with back-propagation, and show both."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mpc_dist.report.timeline import draw_figure
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.schedule import Interval, build_schedule, lay_out, parse_action, simulate
from mpc_dist.schedule.calibrate import measure_costs
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.loop import train
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.sections import CheckpointsConfig, HorizonConfig

SUMMARY = "Train on local ranks with horizon 1 and with back-propagation, side by side."


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    step_seconds: float
    """Median over the later half of the steps, of the slowest rank."""
    live_bytes: tuple[int, ...]
    """Peak bytes held for backward, by rank."""
    train_loss: float
    test_loss: float
    measured: tuple[tuple[Interval, ...], ...]
    """The last step, by rank."""
    simulated: tuple[tuple[Interval, ...], ...]
    simulated_seconds: float


def run(argv: Sequence[str]) -> None:
    """Train twice, print the comparison and draw the timelines."""
    parser = ConfigParser(argv, prog="mpc-dist demo", description=SUMMARY)
    parser.parser.add_argument("--out", type=str, default="runs/demo/train", help="Folder for metrics and the figure.")
    config, options = parser.parse()
    folder, console = Path(options.out), Console()
    folder.mkdir(parents=True, exist_ok=True)
    horizons = {"h = 1 stage": HorizonConfig("sliding", 1, "stages"), "back-propagation": HorizonConfig("backprop")}
    outcomes = {}
    for name, horizon in horizons.items():
        place = folder / ("horizon1" if horizon.windows == "sliding" else "backprop")
        training = replace(config.training, folder=str(place), log_every=1)
        chosen = replace(config, horizon=horizon, training=training, checkpoints=CheckpointsConfig(every=0))
        with console.status(f"{name}: training on {config.parallel.stages} ranks"):
            outcomes[name] = _train(chosen)
    console.print(_table(config, outcomes))
    charts: dict[str, Sequence[Sequence[Interval]]] = {}
    for name, outcome in outcomes.items():
        charts[f"{name}, measured: {1000 * outcome.step_seconds:.1f} ms per step"] = outcome.measured
        charts[f"{name}, simulated: {1000 * outcome.simulated_seconds:.1f} ms per step"] = outcome.simulated
    draw_figure(charts, unit="seconds").savefig(folder / "timelines.png", dpi=150)
    console.print(f"figure: {folder / 'timelines.png'}", highlight=False, soft_wrap=True)


def _train(config: Config) -> Outcome:
    num_ranks = config.num_ranks
    run_local_ranks(_train_rank, num_ranks, config, timeout=600.0)
    folder = Path(config.training.folder)
    lines = [read_metrics(folder, rank) for rank in range(num_ranks)]
    steps = [[line for line in found if line["event"] == "step"] for found in lines]
    timelines = [_read_timelines(found) for found in lines]
    measured = tuple(found[-1] for found in timelines)
    layout = lay_out(config.horizon.build(config.partition), config.partition)
    costs = measure_costs([timeline for found in timelines for timeline in found])
    schedule = build_schedule(layout, config.parallel.microbatches, split=config.parallel.split, costs=costs)
    price = simulate(schedule, layout, costs)
    last = str(config.model.num_blocks)
    evaluation = next(line for line in reversed(lines[-1]) if line["event"] == "evaluation")
    return Outcome(
        step_seconds=max(statistics.median(_periods(found)) for found in steps),
        live_bytes=tuple(found[0]["live_bytes"] for found in steps),
        train_loss=steps[-1][-1]["losses"][last],
        test_loss=evaluation["scores"][last]["loss"],
        measured=measured,
        simulated=price.timeline,
        simulated_seconds=price.step_time,
    )


def _train_rank(rank: int, config: Config) -> None:
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)


def _periods(steps: list[dict[str, Any]]) -> list[float]:
    later = steps[len(steps) // 2 :]
    return [line["step_seconds"] for line in later]


def _read_timelines(lines: list[dict[str, Any]]) -> list[tuple[Interval, ...]]:
    """A rank's last steps, in order."""
    return [
        tuple(Interval(parse_action(text), start, end) for text, start, end in line["actions"])
        for line in lines
        if line["event"] == "timeline"
    ]


def _table(config: Config, outcomes: dict[str, Outcome]) -> Table:
    values = config.as_dict()
    table = Table(
        title=f"{values['model']['name']}, {config.model.num_blocks} blocks on {config.parallel.stages} ranks, "
        f"{config.parallel.microbatches} micro-batches, {config.training.steps} steps",
        caption="MiB held: most bytes kept for backward, by rank; simulated: from the measured times of the actions",
    )
    for heading in ("", "ms/step", "simulated", "MiB held", "train loss", "test loss"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, outcome in outcomes.items():
        held = ", ".join(f"{size / 2**20:.2f}" for size in outcome.live_bytes)
        table.add_row(
            name,
            f"{1000 * outcome.step_seconds:.1f}",
            f"{1000 * outcome.simulated_seconds:.1f}",
            held,
            f"{outcome.train_loss:.4f}",
            f"{outcome.test_loss:.4f}",
        )
    return table
