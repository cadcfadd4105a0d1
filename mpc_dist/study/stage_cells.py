"""A cell that tunes the learning rate of one way to train, then trains with it from several seeds.

Windows are counted in stages, as on ranks: every loss is read at the end of a stage.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpc_dist.data import Batch, Batches, DataSource
from mpc_dist.models import BlockModel, Chain, build_chain
from mpc_dist.planner.adapt import GrowingHorizon
from mpc_dist.profile import measure_angles
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out, split_evenly
from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import TrainingCell, Watch, WindowChoice
from mpc_dist.training.optimizer import LearningRate, build_optimizer
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import Windows, expand

COSINE = "CosineAnnealingLR"


@dataclass(frozen=True)
class StagedWindows(WindowChoice):
    """Windows over the stages of a model that is cut as evenly as can be."""

    num_stages: int = 8

    def build(self, num_blocks: int) -> Windows:
        """Over the blocks: a block aims where its stage does."""
        return expand(super().build(self.num_stages), split_evenly(num_blocks, self.num_stages))


@dataclass(frozen=True)
class AdaptiveCell(TrainingCell):
    """Train with tumbling windows that grow, as the trainer does with `horizon: {mode: adaptive}`."""

    num_stages: int = 8
    every: int = 50
    """Steps between decisions."""

    def run(self) -> Result:
        """As of a training cell, and `sizes`: [step, stages per window from then on, reason]."""
        data = self.data.load()
        chain = build_chain(self.model, data.task, readout=self.readout.kind, seed=self.seed)
        # One optimizer of all weights outlives the pipelines; heads that are read no more have no gradient.
        trained = [parameter for parameter in chain.parameters() if parameter.requires_grad]
        optimizer = build_optimizer(self.optimizer, trained, blocks=chain.blocks)
        rate = LearningRate(self.optimizer, optimizer)
        rule = GrowingHorizon(self.num_stages)
        pipeline = self._build(chain, rule.size, optimizer)
        batches = Batches(data.train, batch_size=self.batch_size, seed=self.seed)
        watch = Watch(self, chain, data, self._windows(rule.size))
        watch.look(0)
        sizes: list[list[object]] = [[0, rule.size, "start"]]
        recent: list[Tensor] = []
        for step in range(1, self.steps + 1):
            batch = next(batches)
            (record,) = pipeline.step(*batch)
            recent.append(record.losses[pipeline.layout.num_segments][0])
            watch.add(recent[-1])
            rate.step()
            if step % self.every == 0 and step < self.steps:
                before = rule.size
                decision = rule.decide(self._cosine(chain, before, batch), float(torch.stack(recent).mean()))
                recent = []
                if decision.size != before:
                    sizes.append([step, decision.size, decision.reason])
                    pipeline = self._build(chain, decision.size, optimizer)
            if not watch.look(step):
                break
        return {**watch.as_result(), "sizes": sizes}

    def _windows(self, size: int) -> Windows:
        return StagedWindows("tumbling", size, num_stages=self.num_stages).build(self.model.num_blocks)

    def _build(self, chain: Chain, size: int, optimizer: torch.optim.Optimizer) -> InProcessPipeline:
        layout = lay_out(self._windows(size), [self.model.num_blocks])
        return InProcessPipeline(
            chain,
            layout,
            build_schedule(layout, 1),
            optimizer=lambda _: optimizer,
            options=StageOptions(seed=self.seed),
        )

    def _cosine(self, chain: Chain, size: int, batch: Batch) -> float:
        windows = self._windows(size)
        return measure_angles(chain, [batch], windows=[windows]).cosine(windows)


@dataclass(frozen=True)
class TunedCell:
    """The learning rate with the lowest test loss after a short run of its own seed, then full runs with it."""

    model: BlockModel
    data: DataSource
    windows: StagedWindows | None
    """None: adaptive."""
    optimizer: OptimizerConfig
    """Its learning rate is replaced; a cosine goes down to 0 over the steps of each run, the short ones too."""
    rates: tuple[float, ...]
    """The grid of learning rates."""
    batch_size: int
    steps: int
    tuning_steps: int
    seeds: tuple[int, ...]
    tuning_seed: int
    """None of the seeds: what is reported was not tuned on."""
    num_stages: int = 8
    num_evaluations: int = 20
    test_batches: int | None = None
    adapt_every: int = 50

    def __post_init__(self) -> None:
        if self.tuning_seed in self.seeds:
            raise ValueError(f"tuning seed {self.tuning_seed} is among the seeds {self.seeds}; use another")

    def run(self) -> Result:
        """The test losses of tuning, the rate taken, and a run per seed."""
        tuning = [
            self._train(rate, self.tuning_seed, self.tuning_steps, num_evaluations=1)["test"][-1] for rate in self.rates
        ]
        rate = pick_rate(zip(self.rates, tuning, strict=True))
        runs = [self._train(rate, seed, self.steps, num_evaluations=self.num_evaluations) for seed in self.seeds]
        return {"rates": list(self.rates), "tuning": tuning, "rate": rate, "seeds": list(self.seeds), "runs": runs}

    def _train(self, rate: float, seed: int, steps: int, *, num_evaluations: int) -> Result:
        windows = self.windows or StagedWindows("tumbling", 1, num_stages=self.num_stages)
        decay = {"T_max": steps} if self.optimizer.scheduler == COSINE else self.optimizer.scheduler_arguments
        optimizer = replace(self.optimizer, lr=rate, scheduler_arguments=decay)
        settings = (self.model, self.data, windows, optimizer, self.batch_size, steps, seed)
        if self.windows is not None:
            cell = TrainingCell(*settings, num_evaluations=num_evaluations, test_batches=self.test_batches)
        else:
            cell = AdaptiveCell(
                *settings,
                num_evaluations=num_evaluations,
                test_batches=self.test_batches,
                num_stages=self.num_stages,
                every=self.adapt_every,
            )
        return cell.run()


def pick_rate(tried: Iterable[tuple[float, float]]) -> float:
    """The learning rate with the lowest loss; one whose loss is no number never wins over one whose is."""
    return min(tried, key=lambda one: (not math.isfinite(one[1]), one[1]))[0]
