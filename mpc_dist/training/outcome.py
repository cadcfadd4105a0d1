"""What a finished run came to, read from its folder."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpc_dist.training.metrics import metrics_path, read_metrics


@dataclass(frozen=True)
class Curve:
    """The test loss at the last boundary during training."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    """Since the start of the run."""
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a run, and the way there."""

    test_loss: float
    test_accuracy: float | None
    step_seconds: float
    """Median over the later half of the logged steps, of the slowest rank."""
    peak_bytes: tuple[int, ...]
    """What each rank held at most: weights, gradients, optimizer state, activations, messages."""
    seconds: float
    """Of the training, of the slowest rank."""
    curve: Curve

    @property
    def num_gpus(self) -> int:
        """One per rank."""
        return len(self.peak_bytes)


def read_outcome(folder: Path, num_ranks: int, num_blocks: int) -> Outcome | None:
    """The outcome of the run in that folder; None if it has not ended on every rank."""
    if not all(metrics_path(folder, rank).exists() for rank in range(num_ranks)):
        return None
    ranks = [read_metrics(folder, rank) for rank in range(num_ranks)]
    if not all(lines and lines[-1]["event"] == "end" for lines in ranks):
        return None
    last = str(num_blocks)
    ends = [lines[-1] for lines in ranks]
    (score, *_) = [end["scores"][last] for end in ends if last in end["scores"]]
    return Outcome(
        test_loss=score["loss"],
        test_accuracy=score["accuracy"],
        step_seconds=max(_median_step(lines) for lines in ranks),
        peak_bytes=tuple(max(line["rank_bytes"] for line in lines if "rank_bytes" in line) for lines in ranks),
        seconds=max(end["seconds"] for end in ends),
        curve=_read_curve(next(lines for lines in ranks if last in lines[-1]["scores"]), last),
    )


def _by_step(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """The lines of an event in the order of steps; of a step that was made again after a resume, the later line."""
    found = {line["step"]: line for line in lines if line["event"] == event}
    return [found[step] for step in sorted(found)]


def _median_step(lines: list[dict[str, Any]]) -> float:
    steps = _by_step(lines, "step")
    seconds: list[float] = [line["step_seconds"] for line in steps[len(steps) // 2 :]]
    return statistics.median(seconds)


def _read_curve(lines: list[dict[str, Any]], boundary: str) -> Curve:
    started = next(line["time"] for line in lines if line["event"] == "start")
    points = [line for line in _by_step(lines, "evaluation") if boundary in line["scores"]]
    return Curve(
        steps=tuple(line["step"] for line in points),
        seconds=tuple(line["time"] - started for line in points),
        losses=tuple(line["scores"][boundary]["loss"] for line in points),
    )
