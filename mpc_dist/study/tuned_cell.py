"""A cell that finds the best of some learning rates by a short run each, then trains with it from several seeds."""

import math
from dataclasses import dataclass, replace

from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import TrainingCell


@dataclass(frozen=True)
class TunedCell:
    """One method on one task."""

    training: TrainingCell
    """Its learning rate and seed are replaced."""
    rates: tuple[float, ...]
    """One alone is taken as it is."""
    seeds: tuple[int, ...]
    tuning_seed: int = 1000
    """Not among the seeds, so that no result was chosen for being good."""

    def run(self) -> Result:
        """The rate, the training loss that each rate reached after half the steps, and each seed's run."""
        half = max(self.training.steps // 2, 1)
        short = replace(
            self.training,
            steps=half,
            num_evaluations=2,
            test_batches=1,
            seed=self.tuning_seed,
            watches_interior=False,
            angles_at=(),
        )
        reached = {}
        if len(self.rates) > 1:
            reached = {rate: reached_loss(with_rate(short, rate).run(), half) for rate in self.rates}
        best = min(reached, key=lambda rate: reached[rate]) if reached else self.rates[0]
        runs = [replace(with_rate(self.training, best), seed=seed).run() for seed in self.seeds]
        tuning = {str(rate): loss if math.isfinite(loss) else None for rate, loss in reached.items()}
        return {"rate": best, "tuning": tuning, "runs": runs}


def with_rate(cell: TrainingCell, rate: float) -> TrainingCell:
    """The same training with another learning rate."""
    return replace(cell, optimizer=replace(cell.optimizer, lr=rate))


def reached_loss(result: Result, steps: int) -> float:
    """The mean training loss of the last part of a run; infinite if it broke down."""
    loss = result["train"][-1]
    return loss if result["steps"][-1] == steps and loss is not None and math.isfinite(loss) else math.inf
