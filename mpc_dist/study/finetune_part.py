"""All that `reproduce finetune` measured of one model, as read from its records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import mean
from typing import Any

from mpc_dist.profile import LineFit, fit_line
from mpc_dist.study.experiment import Records
from mpc_dist.study.training_cell import WindowChoice

HEAD_ALONE = "head alone"
FRACTION = 2 / 3
"""Share of back-propagation's memory that counts as a fraction."""

_RUN = re.compile(r"(resnet|vit): (.+), rate (\S+), seed (\d+)")


@dataclass(frozen=True)
class Run:
    """One tuning."""

    words: str
    rate: float
    seed: int
    windows: str
    accuracy: float
    loss: float
    tested: int
    """Test images."""
    cell: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """All that was measured of one model."""

    name: str
    runs: tuple[Run, ...]
    memory: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Its kind and size, and what is tuned."""
        blocks = self.memory["num_blocks"]
        return f"ResNet-{2 * blocks + 2}, all weights" if self.name == "resnet" else f"ViT of {blocks} layers, LoRA"

    @property
    def horizons(self) -> list[int]:
        """In units, ascending; the last is back-propagation."""
        return sorted({int(run.words[4:]) for run in self.runs if re.fullmatch(r"h = \d+", run.words)})

    @property
    def unit(self) -> int:
        """Blocks per unit."""
        return int(self.runs[0].cell["windows"]["unit"])

    @property
    def variants(self) -> list[str]:
        """What was trained, in the order of the records."""
        return list(dict.fromkeys(run.words for run in self.runs))

    def find(self, words: str, rate: float | None = None) -> list[Run]:
        """Its runs with a rate, one per seed; by default with its best."""
        wanted = self.best_rate(words) if rate is None else rate
        return [run for run in self.runs if run.words == words and run.rate == wanted]

    def best_rate(self, words: str) -> float:
        """The rate with the highest accuracy, in the mean over seeds."""
        rates = sorted({run.rate for run in self.runs if run.words == words})
        return max(rates, key=lambda rate: mean(run.accuracy for run in self.find(words, rate)))

    def accuracy(self, words: str) -> float:
        """Mean over seeds, with its best rate."""
        return mean(run.accuracy for run in self.find(words))

    def at(self, horizon: int) -> float:
        """The accuracy of a horizon."""
        return self.accuracy(f"h = {horizon}")

    @property
    def backprop(self) -> float:
        """The accuracy of the largest horizon."""
        return self.at(self.horizons[-1])

    @property
    def num_tested(self) -> int:
        """Test images of a run."""
        return self.runs[0].tested

    @property
    def error(self) -> float:
        """One standard error of a seed's accuracy, at back-propagation's."""
        return float((self.backprop * (1 - self.backprop) / self.num_tested) ** 0.5)

    @property
    def held(self) -> dict[int, int]:
        """Bytes held for backward by sliding horizon, in units; all of them."""
        choices = {h: str(WindowChoice("sliding", h, self.unit)) for h in range(1, self.horizons[-1] + 1)}
        return {horizon: self.memory["held"][words] for horizon, words in choices.items()}

    def held_by(self, words: str) -> int:
        """Bytes that windows hold which were trained with, sliding or not."""
        return int(self.memory["held"][self.find(words)[0].windows])

    def share(self, horizon: int) -> float:
        """Of the bytes that back-propagation holds."""
        return self.held[horizon] / self.held[self.horizons[-1]]

    @property
    def moderate(self) -> list[int]:
        """The horizons that hold a fraction of the memory, without the smallest."""
        return [h for h in self.horizons[1:-1] if self.share(h) <= FRACTION]

    @property
    def best_moderate(self) -> int | None:
        """The most accurate of them."""
        return max(self.moderate, key=self.at, default=None)

    @property
    def line(self) -> LineFit:
        """Through M(h)."""
        return fit_line(self.held)

    @property
    def order(self) -> float:
        """The share of pairs of horizons of which the larger is at least as accurate."""
        pairs = list(combinations(self.horizons, 2))
        return mean(float(self.at(large) >= self.at(small)) for small, large in pairs)


def read_parts(records: Records) -> list[Part]:
    """The models' parts, in order."""
    found: dict[str, list[Run]] = {}
    for name, record in records.items():
        match = _RUN.fullmatch(name)
        if match is None:
            continue
        task, words, rate, seed = match.groups()
        result, cell = record.result, record.cell
        windows = str(WindowChoice(**cell["windows"]))
        run = Run(
            words, float(rate), int(seed), windows, result["accuracy"][-1], result["test"][-1], result["tested"], cell
        )
        found.setdefault(task, []).append(run)
    return [Part(name, tuple(runs), records[f"memory: {name}"].result) for name, runs in found.items()]
