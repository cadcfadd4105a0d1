"""Reads the losses of every horizon, over time and seeds, from an experiment's records."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpc_dist.study.cell import Record
from mpc_dist.study.experiment import Records

Losses = dict[str, list[float]]
"""`train` and `test`, a value per epoch or evaluation; infinity from where a run diverged."""


@dataclass(frozen=True)
class Curves:
    """One task: every horizon, several seeds."""

    title: str
    size: str
    unit: str
    """What a point of a curve stands for: epoch, or a number of steps."""
    num_blocks: int
    is_short: bool
    """Whether it shows only that nothing is learned."""
    runs: dict[int, list[Losses]] = field(default_factory=dict)
    """By horizon, a run per seed."""
    initial: list[float] = field(default_factory=list)
    """J_0: test loss before training, by seed; empty where it means nothing (batch norm without statistics)."""

    @property
    def horizons(self) -> list[int]:
        """Ascending."""
        return sorted(self.runs)

    @property
    def num_seeds(self) -> int:
        """Of each horizon."""
        return min(len(runs) for runs in self.runs.values())

    @property
    def early(self) -> int:
        """The first point of a curve."""
        return 0

    @property
    def early_words(self) -> str:
        """When that is."""
        return f"after the first {self.unit}"

    def at(self, kind: str, horizon: int, point: int) -> float:
        """Median of the seeds; infinity if a seed diverged in the end."""
        values = [run[kind][point] for run in self.runs[horizon]]
        return statistics.median(values) if all(map(math.isfinite, values)) else math.inf

    def final(self, kind: str, horizon: int) -> float:
        """The same at the end."""
        return self.at(kind, horizon, -1)

    def spread(self, kind: str, horizon: int) -> tuple[float, float]:
        """Least and greatest of the seeds at the end."""
        values = [run[kind][-1] for run in self.runs[horizon]]
        return min(values), max(values)

    def finals(self, kind: str) -> list[float]:
        """At the end, by horizon."""
        return [self.final(kind, horizon) for horizon in self.horizons]

    def rate(self, horizon: int, point: int) -> float:
        """r(h) = ln(J_h/J_0) / ln(J_T/J_0) of the test losses at a point, median of the seeds."""
        last = self.horizons[-1]
        rates = [
            relative_rate(ours["test"][point], full["test"][point], start)
            for ours, full, start in zip(self.runs[horizon], self.runs[last], self.initial, strict=True)
        ]
        return statistics.median(rates)


def relative_rate(loss: float, full: float, initial: float) -> float:
    """r = ln(J_h/J_0) / ln(J_T/J_0); minus infinity for a run that diverged."""
    return -math.inf if not math.isfinite(loss) else math.log(loss / initial) / math.log(full / initial)


def share_of_falling_pairs(values: list[float]) -> float:
    """Of all pairs of horizons, the share in which the larger one has the lower value."""
    pairs = [(low, high) for i, low in enumerate(values) for high in values[i + 1 :]]
    return float(np.mean([high < low for low, high in pairs])) if pairs else math.nan


def read_curves(records: Records) -> list[Curves]:
    """The tasks in the order of their records."""
    found: dict[str, Curves] = {}
    for record in records.values():
        if record.cell["kind"] == "DenseCell":
            _add_dense(found, record)
        elif record.cell["kind"] == "TrainingCell":
            _add_resnet(found, record)
    return list(found.values())


def _add_dense(found: dict[str, Curves], record: Record) -> None:
    cell, result = record.cell, record.result
    name = {"res_linear": "linear residual net", "res_mlp": "residual MLP"}[cell["model"]["name"]]
    words = "factor in the model" if cell["learns_scaled"] else "factor at the start"
    is_short = cell["branch_scale"] == 1
    title = f"{name}, {'no factor' if is_short else words}"
    size = f"{cell['data']['num_train']:,} samples, batches of {cell['batch_size']}, {cell['epochs']} epochs"
    curves = found.setdefault(title, Curves(title, size, "epoch", cell["model"]["num_blocks"], is_short))
    curves.initial.append(result["test"][0][0])
    for choice, train, test in zip(cell["windows"], result["train"], result["test"], strict=True):
        if choice["kind"] == "sliding":
            runs = curves.runs.setdefault(choice["size"], [])
            runs.append({"train": _finite(train), "test": _finite(test[1:])})


def _add_resnet(found: dict[str, Curves], record: Record) -> None:
    cell, result = record.cell, record.result
    num_blocks = 3 * cell["model"]["blocks_per_group"]
    title = f"ResNet-{2 * num_blocks + 2}, narrow"
    every = cell["steps"] // cell["num_evaluations"]
    size = (
        f"{cell['model']['channels']} channels, 10,000 images, batches of {cell['batch_size']}, {cell['steps']} steps"
    )
    curves = found.setdefault(title, Curves(title, size, f"{every} steps", num_blocks, False))
    missing = cell["num_evaluations"] + 1 - len(result["steps"])
    losses = {kind: _finite([*result[kind][1:], *[None] * missing]) for kind in ("train", "test")}
    curves.runs.setdefault(cell["windows"]["size"], []).append(losses)


def _finite(values: list[Any]) -> list[float]:
    return [value if value is not None and math.isfinite(value) else math.inf for value in values]
