"""The card of a run: what it was, how it ended, and the commands that repeat it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpc_dist.report.angles import format_bytes
from mpc_dist.report.panel import Shown, format_percent
from mpc_dist.report.replay import Replay, mean_idle_share
from mpc_dist.report.run import Run
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints

MAX_OPEN_BLOCKS = 12
"""Window maps of more blocks are folded away at first."""
MAX_DRAWN_BLOCKS = 128


@dataclass(frozen=True)
class Command:
    """A command line and what it does."""

    what: str
    line: str


@dataclass(frozen=True)
class Card:
    """A run at a glance."""

    name: str
    style: str
    shape: str
    status: str
    headlines: tuple[tuple[str, str], ...]
    """The numbers one looks for first, with their names."""
    facts: tuple[tuple[str, str], ...]
    window_map: str
    is_map_open: bool
    notes: tuple[str, ...]
    commands: tuple[Command, ...]


def build_card(shown: Shown) -> Card:
    """What the page says of one run."""
    run = shown.run
    is_small = run.num_blocks <= MAX_DRAWN_BLOCKS
    return Card(
        name=shown.name,
        style=shown.style,
        shape=shown.shape,
        status=run.status,
        headlines=_headlines(run),
        facts=tuple(_facts(shown)),
        window_map=str(run.windows) if is_small else f"{run.num_blocks} blocks: too many to draw",
        is_map_open=run.num_blocks <= MAX_OPEN_BLOCKS,
        notes=run.notes,
        commands=_commands(run),
    )


def format_duration(seconds: float) -> str:
    """Seconds as a clock would say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _headlines(run: Run) -> tuple[tuple[str, str], ...]:
    last = run.last_evaluation
    score = None if last is None else last.exits.get(run.num_blocks)
    sizes = [one.rank_bytes for one in run.ranks if one.rank_bytes is not None]
    found = [("test loss", "–" if score is None else f"{score.loss:.4g}")]
    if score is not None and score.accuracy is not None:
        found.append(("test accuracy", f"{100 * score.accuracy:.1f} %"))
    found.append(("per step", "–" if run.step_seconds is None else _short_seconds(run.step_seconds)))
    found.append(("fullest rank", format_bytes(max(sizes)) if sizes else "–"))
    return tuple(found)


def _short_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _facts(shown: Shown) -> list[tuple[str, str]]:
    run, config = shown.run, shown.run.config
    parallel, optimizer, horizon = config["parallel"], config["optimizer"], config["horizon"]
    planned = config["training"]["steps"]
    replicas = f" x {run.num_replicas} replica{'s' if run.num_replicas > 1 else ''}"
    found = [
        ("model", _describe(config["model"])),
        ("data", _describe(config["data"])),
        ("windows", _describe_horizon(horizon, shown)),
        ("readout", str(config["readout"]["kind"])),
        (
            "layout",
            f"{run.num_stages} stage{'s' if run.num_stages > 1 else ''}{replicas} on {run.device.split(':')[0]}",
        ),
        ("partition", "|".join(map(str, run.partition))),
        ("micro-batches", f"{parallel['microbatches']} of {config['batch_size'] // parallel['microbatches']} samples"),
        ("backward", "input and weight half apart" if parallel["split"] else "whole"),
        ("optimizer", f"{optimizer['name']}, rate {optimizer['lr']:g}"),
        ("steps", f"{run.last_step:,}" if run.last_step == planned else f"{run.last_step:,} of {planned:,}"),
        ("time", format_duration(run.elapsed)),
    ]
    if isinstance(shown.replay, Replay):
        found.append(("bubble", f"{format_percent(mean_idle_share(shown.replay.measured))} of a step, all ranks"))
    return found


def _describe_horizon(horizon: Mapping[str, Any], shown: Shown) -> str:
    if horizon["mode"] == "adaptive":
        size = shown.run.adaptations[-1].size if shown.run.adaptations else 1
        return f"adaptive, decided every {horizon['every']} steps; now tumbling {_count(size, 'stage')}"
    words = str(horizon["windows"])
    if horizon["size"] is not None and words in ("sliding", "cumulative", "tumbling"):
        words += " " + _count(horizon["size"], horizon["unit"].removesuffix("s"))
    return words + (" (planned)" if shown.run.plan is not None else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe(section: Mapping[str, Any]) -> str:
    """The family's name and its fields, as the configuration has them."""
    fields = [
        f"{key.replace('_', ' ')} {_plain(value)}"
        for key, value in section.items()
        if key != "name" and value is not None
    ]
    return f"{section['name']}: {', '.join(fields)}" if fields else str(section["name"])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _commands(run: Run) -> tuple[Command, ...]:
    folder = run.folder
    plan = [] if run.plan is None else ["--plan", str(folder / "plan.yaml")]
    again = folder.with_name(f"{folder.name}-again")
    options = ["--config", str(folder / "config.yaml"), *plan]
    start = ["torchrun", "--standalone", "--nproc-per-node", str(run.num_ranks), "launch/train.py"]
    if run.num_ranks == 1:
        start = ["python", "launch/train.py"]
    commands = [
        Command("Train again, on this machine", shlex.join([*start, *options, "--training.folder", str(again)])),
        Command("Compare both", shlex.join(["mpc-dist", "report", str(folder), str(again)])),
    ]
    if list_checkpoints(folder_of(folder)):
        more = ["--training.folder", str(folder), "--training.steps", str(2 * run.config["training"]["steps"])]
        weights = folder.with_name(f"{folder.name}-weights")
        commands += [
            Command("Go on from the last checkpoint", shlex.join([*start, *options, *more])),
            Command("Write the weights", shlex.join(["mpc-dist", "export", str(folder), "--to", str(weights)])),
        ]
    return tuple(commands)
