"""What a finished run came to, for comparing it with others."""

from dataclasses import dataclass
from pathlib import Path

from mpc_dist.report.run import read_run


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
    """From its first line to its last, of the slowest rank; pauses before a resume are left out."""
    curve: Curve

    @property
    def num_gpus(self) -> int:
        """One per rank."""
        return len(self.peak_bytes)


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of the run in that folder; None if there is none, or it has not ended on every rank."""
    try:
        run = read_run(folder)
    except (ValueError, OSError):
        return None
    sizes = tuple(rank.rank_bytes for rank in run.ranks if rank.rank_bytes is not None)
    if run.status != "finished" or run.last_evaluation is None or run.step_seconds is None:
        return None
    score = run.last_evaluation.exits[run.num_blocks]
    steps, seconds, losses = zip(*run.test_losses, strict=True)
    return Outcome(
        test_loss=score.loss,
        test_accuracy=score.accuracy,
        step_seconds=run.step_seconds,
        peak_bytes=sizes,
        seconds=run.elapsed,
        curve=Curve(steps, seconds, losses),
    )
