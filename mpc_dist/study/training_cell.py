"""A cell that trains a model in one process, with any windows, and watches its losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from mpc_dist.data import Batch, Batches, Dataset, DataSource
from mpc_dist.models import BlockModel, Chain, build_chain
from mpc_dist.profile import measure_angles
from mpc_dist.readout import ReadoutConfig
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.study.cell import Result
from mpc_dist.training.optimizer import LearningRate, build_optimizer
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import Windows, backprop, cumulative, expand, loco, sliding, tumbling

MOST_TESTED = 500
"""Samples of a test batch."""
MOST_LOOKED_AT = 64
"""Samples with which interior losses and states are watched."""
NUM_PROBES = 2
"""Batches over which an angle is averaged."""


@dataclass(frozen=True)
class WindowChoice:
    """Which windows, for a model of any depth."""

    kind: Literal["sliding", "anchored", "near", "cumulative", "tumbling", "loco", "backprop"]
    """near: sliding, and each unit aims at its own output too, by `near_weight`."""
    size: int = 0
    """Horizon or group size in units; 0 for those that have none."""
    unit: int = 1
    """Blocks per unit: losses are read at the ends of units only."""
    stride: int = 1
    """anchored: units between losses."""
    near_weight: float = 0.0
    """near: weight of the loss at a unit's own output; the one further ahead has 1."""

    def build(self, num_blocks: int) -> Windows:
        """Over the blocks; the last unit may be shorter."""
        sizes = [self.unit] * (num_blocks // self.unit)
        if num_blocks % self.unit:
            sizes.append(num_blocks % self.unit)
        count = len(sizes)
        builders = {
            "sliding": lambda: sliding(count, self.size),
            "anchored": lambda: sliding(count, self.size, sorted({*range(self.stride, count + 1, self.stride), count})),
            "near": lambda: add_near(sliding(count, self.size), self.near_weight),
            "cumulative": lambda: cumulative(count, self.size),
            "tumbling": lambda: tumbling(count, self.size),
            "loco": lambda: loco(count),
            "backprop": lambda: backprop(count),
        }
        return expand(builders[self.kind](), sizes)

    def __str__(self) -> str:
        words = [self.kind, *([str(self.size)] if self.size else [])]
        if self.kind == "anchored":
            words.append(f"every {self.stride}")
        if self.kind == "near":
            words = ["sliding", str(self.size), f"+ {self.near_weight:g} near"]
        return " ".join(words) + (f" (units of {self.unit})" if self.unit > 1 else "")


def add_near(windows: Windows, weight: float) -> Windows:
    """The windows with each block's own output among its targets, by this weight."""
    grown = []
    for block, aims in enumerate(windows.targets):
        weights = dict(aims)
        weights[block + 1] = weights.get(block + 1, 0.0) + weight
        grown.append(tuple(sorted(weights.items())))
    return Windows(tuple(grown))


@dataclass(frozen=True)
class TrainingCell:
    """Train from scratch, or from the model's checkpoint; losses are of the last boundary."""

    model: BlockModel
    data: DataSource
    windows: WindowChoice
    optimizer: OptimizerConfig
    batch_size: int
    steps: int
    seed: int
    """Of initial weights and the order of the data."""
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)
    num_evaluations: int = 20
    """Spread evenly over the steps; the initial state is evaluated besides."""
    test_batches: int | None = None
    """Test batches per evaluation; None: the whole test set."""
    angles_at: tuple[int, ...] = ()
    """Steps after which cos(theta_h) of every sliding horizon is measured, on two batches of the training data."""
    watches_interior: bool = False
    """Whether each evaluation keeps the loss at every readout that is aimed at, and the size of every state."""

    def run(self) -> Result:
        """Losses and accuracies over the steps; a run whose loss is no number any more ends there."""
        return self.train()[1]

    def train(self) -> tuple[Chain, Result]:
        """As `run`, with the trained chain besides."""
        data = self.data.load()
        chain = build_chain(self.model, data.task, readout=self.readout, seed=self.seed)
        windows = self.windows.build(self.model.num_blocks)
        layout = lay_out(windows, [self.model.num_blocks])
        pipeline = InProcessPipeline(
            chain,
            layout,
            build_schedule(layout, 1),
            optimizer=partial(build_optimizer, self.optimizer, blocks=chain.blocks),
            options=StageOptions(seed=self.seed),
        )
        (stage,) = pipeline.stages
        rate = LearningRate(self.optimizer, stage.optimizer)
        batches = Batches(data.train, batch_size=self.batch_size, seed=self.seed)
        watch = Watch(self, chain, data, windows)
        watch.look(0)
        epoch_losses: list[torch.Tensor] = []
        for step in range(1, self.steps + 1):
            epoch = batches.epoch
            (record,) = pipeline.step(*next(batches))
            loss = record.losses[layout.num_segments][0]
            watch.add(loss)
            rate.step()
            epoch_losses.append(loss)
            if batches.epoch != epoch:
                if rate.drop is not None:
                    rate.drop.end_epoch(float(torch.stack(epoch_losses).mean()))
                epoch_losses = []
            if not watch.look(step):
                break
        return chain, watch.as_result()


class Watch:
    """Evaluates a chain on the way, as a cell asks."""

    def __init__(self, cell: TrainingCell, chain: Chain, data: Dataset, windows: Windows) -> None:
        self._cell = cell
        self._chain = chain
        self._read_at = windows.readouts
        self._recent: list[Tensor] = []
        size = min(MOST_TESTED, data.test.num_samples)
        tests = Batches(data.test, batch_size=size, seed=0, shuffle=False)
        self._tests = list(islice(tests, cell.test_batches or tests.batches_per_epoch))
        probes = Batches(data.train, batch_size=cell.batch_size, seed=0)
        self._probes = list(islice(probes, NUM_PROBES if cell.angles_at else 0))
        self._steps: list[int] = []
        self._train: list[float | None] = []
        self._test: list[float] = []
        self._accuracy: list[float] = []
        self._cosines: dict[int, list[float]] = {}
        self._angle_gaps: dict[int, list[float]] = {}
        self._interior: dict[int, dict[str, list[float]]] = {}
        self._due = {round(cell.steps * i / cell.num_evaluations) for i in range(cell.num_evaluations + 1)}

    def add(self, loss: Tensor) -> None:
        """The training loss of a step."""
        self._recent.append(loss)

    def look(self, step: int) -> bool:
        """Evaluate and probe if it is time; whether the run makes sense still."""
        if step in self._cell.angles_at and is_finite(self._chain):
            cosines = measure_angles(self._chain, self._probes).horizon_cosines()
            self._cosines[step] = [keep_digits(value, 9) for value in cosines]
            self._angle_gaps[step] = [keep_digits(1 - value) for value in cosines]
        if step not in self._due:
            return True
        loss, accuracy = evaluate(self._chain, self._tests)
        self._steps.append(step)
        self._train.append(keep_digits(float(torch.stack(self._recent).mean())) if self._recent else None)
        self._test.append(keep_digits(loss))
        self._accuracy += [] if accuracy is None else [keep_digits(accuracy)]
        self._recent = []
        if self._cell.watches_interior:
            self._interior[step] = look_inside(self._chain, self._tests[0], self._read_at)
        return math.isfinite(loss)

    def as_result(self) -> Result:
        """What was seen; `train` holds means over the steps since the evaluation before."""
        tested = sum(len(labels) for _, labels in self._tests)
        result: Result = {"steps": self._steps, "train": self._train, "test": self._test, "tested": tested}
        if self._accuracy:
            result["accuracy"] = self._accuracy
        if self._cosines:
            result["cosines"] = {str(step): values for step, values in self._cosines.items()}
            # 1 - cos with digits of its own: near T the cosine's are nines.
            result["angle_gaps"] = {str(step): values for step, values in self._angle_gaps.items()}
        if self._interior:
            result["interior"] = {str(step): values for step, values in self._interior.items()}
        return result


def look_inside(chain: Chain, batch: Batch, boundaries: Sequence[int]) -> dict[str, list[float]]:
    """Of a batch's first samples, the losses at these boundaries, and the root mean square of every state."""
    inputs, labels = (part[:MOST_LOOKED_AT] for part in batch)
    losses, sizes = [], []
    chain.eval()
    with torch.no_grad():
        state = inputs
        for boundary, block in enumerate(chain.blocks, start=1):
            state = block(state)
            sizes.append(keep_digits(float(state.square().mean().sqrt())))
            if boundary in boundaries:
                losses.append(keep_digits(float(chain.loss_at(boundary, state, labels))))
    chain.train()
    return {"losses": losses, "sizes": sizes}


def evaluate(chain: Chain, batches: Sequence[Batch]) -> tuple[float, float | None]:
    """Mean loss at the last boundary, and the share of right predictions where labels are classes."""
    score = Score()
    chain.eval()
    with torch.no_grad():
        for inputs, labels in batches:
            state = inputs
            for block in chain.blocks:
                state = block(state)
            score = score.add(chain.readouts[str(chain.num_blocks)](state), labels, chain.loss)
    chain.train()
    return score.loss, score.accuracy


def is_finite(chain: Chain) -> bool:
    """Whether every weight is a number still."""
    return all(bool(torch.isfinite(parameter).all()) for parameter in chain.parameters())


def keep_digits(value: float, digits: int = 6) -> float:
    """The value with so many significant digits: no more are worth keeping."""
    return float(f"{value:.{digits}g}")
