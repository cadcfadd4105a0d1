"""`mpc-dist sweep`: train one configuration with several horizons and seeds, and compare them."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mpc_dist.report.outcome import Outcome, read_outcome
from mpc_dist.report.sweep import Family, SweepReport
from mpc_dist.training.config import Config, ConfigParser
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.sections import HorizonConfig, plain_windows
from mpc_dist.validation import check_whole

SUMMARY = "Train with several horizons and seeds, as one group of runs, and compare them."
SIZED = ("sliding", "tumbling", "cumulative")
UNSIZED = ("backprop", "loco")
LOOK_EVERY = 0.5
"""Seconds between two looks at a member's metrics."""
MEMBER_FILE = "member.yaml"
LOG_FILE = "log.txt"


class SweepError(RuntimeError):
    """Some runs of a sweep failed; the others are complete."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    horizon: str
    """As the user wrote it."""
    seed: int
    config: Config

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.config.training.folder)

    def is_of_another_configuration(self) -> bool:
        """Whether its folder holds a run that was configured differently."""
        asked = self.folder / MEMBER_FILE
        return asked.exists() and asked.read_text(encoding="utf-8") != self.config.as_yaml()

    def read(self) -> Outcome | None:
        """What it came to; None unless it has ended, with this very configuration."""
        if self.is_of_another_configuration():
            return None
        return read_outcome(self.folder)


def run(argv: Sequence[str]) -> None:
    """Run what has not been run yet, print the comparison, write it and draw it."""
    parser = ConfigParser(argv, prog="mpc-dist sweep", description=SUMMARY)
    add = parser.parser.add_argument
    add(
        "--horizons",
        type=str,
        default="1,backprop",
        help="Comma-separated: numbers of stages (tumbling windows), auto, backprop, loco, or e.g. sliding:2.",
    )
    add("--seeds", type=int, default=1, help="Runs per horizon, with seeds from `--seed` on.")
    add("--out", type=str, default="runs/sweep", help="Folder of the runs and the comparison; its name is the group.")
    config, options = parser.parse()
    out = Path(options.out)
    members = list_members(config, options.horizons.split(","), options.seeds, out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console() if Console().is_terminal else Console(width=130)
    complete, failed = _run_all(members, console)
    if complete:
        report = SweepReport(_families(complete))
        console.print(report.table())
        report.write(out / "sweep.json")
        report.figure().savefig(out / "sweep.png", dpi=150)
        console.print(f"figure: {out / 'sweep.png'}", highlight=False, soft_wrap=True)
    if failed:
        logs = ", ".join(str(member.folder / LOG_FILE) for member in failed)
        raise SweepError(f"{len(failed)} of {len(members)} runs failed; see {logs}; the same command runs them again")


def list_members(config: Config, horizons: Sequence[str], num_seeds: int, out: Path) -> list[Member]:
    """Every horizon with every seed; what is wrong with any of them is found here, before the first run."""
    check_whole("--seeds", num_seeds, minimum=1)
    if len(set(horizons)) != len(horizons):
        raise ValueError(f"--horizons {','.join(horizons)} names one twice; list each once")
    members = []
    for word in horizons:
        horizon = parse_horizon(word, config.horizon)
        for seed in range(config.seed, config.seed + num_seeds):
            name = f"{'h' if word.isdigit() else ''}{word.replace(':', '')}-seed{seed}"
            chosen = replace(
                config,
                horizon=horizon,
                seed=seed,
                training=replace(config.training, folder=str(out / name)),
                tracking=replace(config.tracking, group=config.tracking.group or out.name, name=name),
            )
            members.append(Member(word, seed, chosen))
    return members


def parse_horizon(word: str, given: HorizonConfig) -> HorizonConfig:
    """A word of `--horizons`, with the unit that the configuration counts in."""
    kind, _, size = word.partition(":")
    if word == "auto":
        return HorizonConfig(mode="auto")
    if word in UNSIZED:
        return HorizonConfig(windows=cast(Any, word), unit=given.unit)
    if word.isdigit():
        kind, size = plain_windows(int(word)), word
    if kind not in SIZED or not size.isdigit():
        raise ValueError(
            f"unknown horizon {word!r}; use a whole number (tumbling windows of so many {given.unit}), auto, "
            f"{', '.join(UNSIZED)}, or one of {', '.join(f'{kind}:2' for kind in SIZED)}"
        )
    return HorizonConfig(windows=cast(Any, kind), size=int(size), unit=given.unit)


def _run_all(members: Sequence[Member], console: Console) -> tuple[list[tuple[Member, Outcome]], list[Member]]:
    """The members that are complete, with their outcomes, and those that failed."""
    complete: list[tuple[Member, Outcome]] = []
    failed: list[Member] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        whole = progress.add_task("runs", total=len(members))
        for member in members:
            outcome = member.read()
            if outcome is not None:
                progress.console.print(f"{member.folder}: complete, not run again", highlight=False, soft_wrap=True)
            else:
                part = progress.add_task(member.folder.name, total=member.config.training.steps)
                outcome = _run(member, partial(_show, progress, part))
                progress.remove_task(part)
            if outcome is not None:
                complete.append((member, outcome))
            else:
                failed.append(member)
                progress.console.print(f"{member.folder}: failed", highlight=False, soft_wrap=True)
            progress.advance(whole)
    return complete, failed


def _show(progress: Progress, part: TaskID, step: int) -> None:
    progress.update(part, completed=step)


def _run(member: Member, show: Callable[[int], None]) -> Outcome | None:
    """Train in processes of its own; None if that failed."""
    if member.is_of_another_configuration():
        _move_aside(member.folder)
    member.folder.mkdir(parents=True, exist_ok=True)
    asked = member.folder / MEMBER_FILE
    asked.write_text(member.config.as_yaml(), encoding="utf-8")
    ranks = ["--standalone", "--nproc-per-node", str(member.config.num_ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "mpc_dist.commands.member"]
    with (member.folder / LOG_FILE).open("w", encoding="utf-8") as log:
        process = subprocess.Popen([*command, "--config", str(asked)], stdout=log, stderr=log, env=_environment())
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                show(_last_step(member.folder))
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait()
    return member.read() if process.returncode == 0 else None


def _move_aside(folder: Path) -> None:
    """Nothing of an earlier sweep is deleted, or taken for this one's."""
    number = next(
        number for number in itertools.count(1) if not folder.with_name(f"{folder.name}.old{number}").exists()
    )
    folder.rename(folder.with_name(f"{folder.name}.old{number}"))


def _environment() -> dict[str, str]:
    """Ours; local ranks share the cores, so each has one thread unless the user says otherwise."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _last_step(folder: Path) -> int:
    return max((line.get("step", 0) for line in read_metrics(folder, 0)[-1:]), default=0)


def _families(complete: Sequence[tuple[Member, Outcome]]) -> list[Family]:
    families: dict[str, Family] = {}
    for member, outcome in complete:
        ran, _ = ConfigParser(["--config", str(member.folder / "config.yaml")], prog="sweep", description="").parse()
        before = families.get(member.horizon, Family(member.horizon, (), {}))
        families[member.horizon] = Family(
            member.horizon,
            tuple(dict.fromkeys([*before.ran, describe_horizon(ran)])),
            {**before.outcomes, member.seed: outcome},
        )
    return list(families.values())


def describe_horizon(config: Config) -> str:
    """Which windows a run had."""
    horizon = config.horizon
    size = "" if horizon.size is None else f" {horizon.size} {horizon.unit}"
    return f"{horizon.windows}{size}"
