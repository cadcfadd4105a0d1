"""A run folder read back: all ranks together, whether the run ended or not."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from mpc_dist.planner.plan import Plan
from mpc_dist.report.series import Adaptation, Evaluation, Point, RankSeries, StepMetrics, read_rank
from mpc_dist.training.metrics import read_metrics
from mpc_dist.windows import Windows, expand, tumbling

Status = Literal["finished", "running", "interrupted"]
SILENCE = 60.0
"""Seconds without a new line after which a run that did not end may be taken for interrupted."""


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    config: Mapping[str, Any]
    """As plain values."""
    num_stages: int
    num_replicas: int
    device: str
    partition: tuple[int, ...]
    first_windows: Windows
    """What training began with."""
    ranks: tuple[RankSeries, ...]
    """Those that wrote something, ascending."""
    former_ranks: tuple[RankSeries, ...]
    """Those that the run no longer has since it was gone on with by fewer."""
    plan: Plan | None
    status: Status
    notes: tuple[str, ...]
    """What a reader should know before trusting the numbers."""

    @property
    def num_ranks(self) -> int:
        """Stages x replicas."""
        return self.num_stages * self.num_replicas

    @property
    def num_blocks(self) -> int:
        """T, which is also the last boundary."""
        return sum(self.partition)

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """The decisions on the horizon; every rank makes the same."""
        return max((one.adaptations for one in self.ranks), key=len)

    @property
    def windows(self) -> Windows:
        """What training ended with."""
        if not self.adaptations:
            return self.first_windows
        return expand(tumbling(self.num_stages, self.adaptations[-1].size), self.partition)

    @property
    def last_step(self) -> int:
        """The last step that some rank wrote of."""
        return max(one.last_step for one in self.ranks)

    @property
    def elapsed(self) -> float:
        """Seconds of the rank that took longest."""
        return max(one.elapsed for one in self.ranks)

    @property
    def step_seconds(self) -> float | None:
        """Of the slowest rank: the median over the later half of its steps."""
        return max((one.step_seconds for one in self.ranks if one.step_seconds is not None), default=None)

    @cached_property
    def train_losses(self) -> tuple[Point, ...]:
        """Training loss at the last boundary, averaged over replicas."""
        ranks = (*self.former_ranks, *self.ranks)
        lines = [(one.step, one.elapsed, one.losses) for rank in ranks for one in rank.steps]
        return _average((step, elapsed, losses.get(self.num_blocks)) for step, elapsed, losses in lines)

    @cached_property
    def test_losses(self) -> tuple[Point, ...]:
        """Test loss at the last boundary."""
        evaluations = [one for rank in (*self.former_ranks, *self.ranks) for one in rank.evaluations]
        found = [one for one in evaluations if self.num_blocks in one.exits]
        return _average((one.step, one.elapsed, one.exits[self.num_blocks].loss) for one in found)

    @cached_property
    def throughput(self) -> tuple[Point, ...]:
        """Samples per second of the slowest rank; the first step, in which bytes are counted, is left out."""
        by_step: dict[int, StepMetrics] = {}
        for one in (one for rank in self.ranks for one in rank.steps if one.step > 1):
            if one.step not in by_step or one.samples_per_second < by_step[one.step].samples_per_second:
                by_step[one.step] = one
        return tuple(Point(step, by_step[step].elapsed, by_step[step].samples_per_second) for step in sorted(by_step))

    @cached_property
    def bubbles(self) -> tuple[Point, ...]:
        """The bubble of each step but the first, averaged over ranks."""
        later = (one for rank in self.ranks for one in rank.steps if one.step > 1)
        return _average((one.step, one.elapsed, one.bubble) for one in later)

    @cached_property
    def last_evaluation(self) -> Evaluation | None:
        """The last one that every rank finished, with the readouts of all of them."""
        by_rank = [{one.step: one for one in rank.evaluations} for rank in self.ranks]
        common = set.intersection(*map(set, by_rank))
        if not common:
            return None
        step = max(common)
        exits = {boundary: found for one in by_rank for boundary, found in one[step].exits.items()}
        return Evaluation(step, max(one[step].elapsed for one in by_rank), dict(sorted(exits.items())))


def read_run(folder: Path, *, now: float | None = None) -> Run:
    """Read a run folder; `now` is the wall clock by which a silent run is told from a running one."""
    lines = {rank: read_metrics(folder, rank) for rank in _ranks_of(folder)}
    starts = [line for found in lines.values() for line in found if line.get("event") == "start"]
    # A run that was gone on with may have had other ranks before: it is what it was last.
    start = max(starts, key=lambda line: line.get("time", 0.0), default=None)
    if start is None:
        raise ValueError(
            f"{folder} is no run folder: no metrics-rank*.jsonl in it has begun; give a folder that launch/train.py "
            "wrote (training.folder)"
        )
    try:
        num_ranks = start["num_stages"] * start["num_replicas"]
        ranks = tuple(read_rank(rank, lines[rank]) for rank in sorted(lines) if rank < num_ranks and lines[rank])
        former = [found for rank, found in sorted(lines.items()) if rank >= num_ranks and found]
        windows = Windows(tuple(tuple((aim[0], aim[1]) for aim in aims) for aims in start["windows"]))
        plan, problem = _read_plan(folder)
        status = _status(ranks, num_ranks, time.time() if now is None else now)
        silent = sorted(set(range(num_ranks)) - {one.rank for one in ranks})
        return Run(
            folder=folder,
            config=start["config"],
            num_stages=start["num_stages"],
            num_replicas=start["num_replicas"],
            device=start["device"],
            partition=tuple(start["partition"]),
            first_windows=windows,
            ranks=ranks,
            former_ranks=tuple(_read_former(found, lines[ranks[0].rank]) for found in former),
            plan=plan,
            status=status,
            notes=(
                *([f"nothing was written by rank {', '.join(map(str, silent))}"] if silent else []),
                *([problem] if problem else []),
                *_resumes(lines[ranks[0].rank]),
                *_stragglers(lines[ranks[0].rank]),
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"the metrics in {folder} are not of this version of mpc_dist ({type(error).__name__}: {error}); read them "
            "with the version that wrote them"
        ) from error


def _read_former(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> RankSeries:
    """A rank that is no longer there; what it did beyond the step from which the others went on does not count."""
    resumed = [line for line in others if line["event"] == "resume" and line["time"] > lines[-1]["time"]]
    return read_rank(-1, [*lines, *resumed[:1]])


def name_runs(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its last parts, as many as tell it apart from the others."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        count = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        names.append("/".join(own[-count:]))
    return names


def _ranks_of(folder: Path) -> list[int]:
    suffixes = (path.stem.removeprefix("metrics-rank") for path in folder.glob("metrics-rank*.jsonl"))
    return sorted(int(suffix) for suffix in suffixes if suffix.isascii() and suffix.isdigit())


def _average(values: Iterable[tuple[int, float, float | None]]) -> tuple[Point, ...]:
    by_step: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step, elapsed, value in values:
        if value is not None:
            by_step[step].append((elapsed, value))
    return tuple(
        Point(step, statistics.fmean(elapsed for elapsed, _ in found), statistics.fmean(value for _, value in found))
        for step, found in sorted(by_step.items())
    )


def _status(ranks: Sequence[RankSeries], num_ranks: int, now: float) -> Status:
    if len(ranks) == num_ranks and all(one.has_ended for one in ranks):
        return "finished"
    newest = max(one.last_time for one in ranks)
    patience = max(SILENCE, 5 * max(one.longest_gap for one in ranks))
    return "running" if now - newest <= patience else "interrupted"


def _resumes(lines: list[dict[str, Any]]) -> list[str]:
    found = [line for line in lines if line["event"] == "resume"]
    return [f"resumed from step {', '.join(str(line.get('step', '?')) for line in found)}"] if found else []


def _stragglers(lines: list[dict[str, Any]]) -> list[str]:
    found = [line["straggler"] for line in lines if line["event"] == "end" and line.get("straggler")]
    return [found[-1]["text"]] if found else []


def _read_plan(folder: Path) -> tuple[Plan | None, str | None]:
    """The plan, or why there is none although there is a file."""
    path = folder / "plan.yaml"
    if not path.exists():
        return None, None
    try:
        return Plan.read(path), None
    except ValueError as error:
        return None, str(error)
