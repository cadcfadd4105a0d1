"""The experiment `selection` (the paper's figure 5): Algorithm 1 against back-propagation, forward-forward and LoCo."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpc_dist.data import Cifar10Data, LinearData, TrigonometricData
from mpc_dist.models import ResLinear, ResMLP, ResNetCifar
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.cell import Cell
from mpc_dist.study.curve_cell import CurveCell
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict
from mpc_dist.study.horizon_verdicts import grade
from mpc_dist.study.horizons import DenseTask, paper_optimizer
from mpc_dist.study.selection_figure import draw_heat_map, draw_rates
from mpc_dist.study.selection_score import ALGORITHM, METHODS, Model, Score, read_models, score
from mpc_dist.study.training_cell import TrainingCell, WindowChoice

GOOD_ESTIMATE = 0.1
"""A mean distance of r^ from the measured r up to which the estimate counts as right."""


@dataclass(frozen=True)
class Setting:
    """A synthetic task with the factor on its branches with which it learns."""

    task: DenseTask
    epochs: int
    learns_scaled: bool


@dataclass(frozen=True)
class Sizes:
    """How long the quality of each horizon is measured."""

    settings: tuple[Setting, ...]
    seeds: int
    resnet: ResNetCifar
    resnet_horizons: tuple[int, ...]
    """Measured; the rate of others is interpolated."""
    resnet_steps: int
    num_batches: int = 4


FULL = Sizes(
    settings=(
        Setting(DenseTask(ResLinear(), LinearData(), "identity", 0.03), epochs=40, learns_scaled=True),
        Setting(DenseTask(ResMLP(), TrigonometricData(), "pool", 0.01), epochs=4, learns_scaled=False),
    ),
    seeds=3,
    resnet=ResNetCifar(channels=4),
    resnet_horizons=(1, 2, 3, 5, 10, 15, 20, 25, 30),
    resnet_steps=50,
)
QUICK = Sizes(
    settings=(
        Setting(DenseTask(ResLinear(), LinearData(num_train=5_000), "identity", 0.03), epochs=4, learns_scaled=True),
        Setting(DenseTask(ResMLP(), TrigonometricData(num_train=10_000), "pool", 0.01), epochs=4, learns_scaled=False),
    ),
    seeds=1,
    resnet=ResNetCifar(blocks_per_group=5, channels=4),
    resnet_horizons=(1, 3, 8, 15),
    resnet_steps=20,
    num_batches=1,
)


def list_loco(num_blocks: int) -> tuple[WindowChoice, ...]:
    """LoCo-3 and LoCo-5: on the chain cut into 3 and into 5 coarse blocks (the paper's appendix B)."""
    for count in (3, 5):
        if num_blocks % count:
            raise ValueError(f"{num_blocks} blocks cannot be cut into {count} of one size; use a multiple of 15")
    return tuple(WindowChoice("loco", unit=num_blocks // count) for count in (3, 5))


def build_cells(sizes: Sizes) -> dict[str, Cell]:
    """Per model, what the algorithm sees and how each method learns."""
    cells: dict[str, Cell] = {}
    for setting in sizes.settings:
        task, count = setting.task, setting.task.model.num_blocks
        name = type(task.model).__name__
        for seed in range(sizes.seeds):
            cells[f"{name}, seed {seed}"] = task.build_cell(
                epochs=setting.epochs,
                seed=seed,
                branch_scale=1 / count,
                learns_scaled=setting.learns_scaled,
                extra=list_loco(count),
            )
        cells[f"{name}, curves"] = CurveCell(
            task.model,
            task.data,
            task.readout,
            batch_size=100,
            num_batches=8,
            seed=0,
            others=list_loco(count),
            branch_scale=1 / count,
            learns_scaled=setting.learns_scaled,
        )
    images, count = Cifar10Data(num_train_files=1), sizes.resnet.num_blocks
    cells["ResNet, curves"] = CurveCell(sizes.resnet, images, "pool", 32, sizes.num_batches, 0, list_loco(count))
    for choice in (*(WindowChoice("sliding", h) for h in sizes.resnet_horizons), *list_loco(count)):
        cells[f"ResNet, {choice}"] = TrainingCell(
            sizes.resnet,
            images,
            choice,
            paper_optimizer(0.01),
            batch_size=32,
            steps=sizes.resnet_steps,
            seed=0,
            readout=ReadoutConfig("pool"),
            num_evaluations=4,
            test_batches=1,
        )
    return cells


def conclude(records: Records) -> Findings:
    """The heat map, the averages and the verdicts."""
    models = read_models(records)
    scores = {model.title: score(model) for model in models}
    return Findings(
        summary=_summarise(scores),
        tables=(_tabulate_averages(scores), *(_tabulate(title, rows) for title, rows in scores.items())),
        pictures=(
            Picture(
                "selection",
                draw_heat_map(scores),
                "Rel of each method: 0 is the best horizon, 1 the worst feasible one; x is infeasible. "
                + " ".join(f"{model.title}: {model.size}." for model in models),
            ),
            Picture(
                "rates",
                draw_rates(models),
                "The measured relative rate r(h), which judges, and cos^2 before training, by which the algorithm "
                "selects. " + " ".join(f"{model.title}: {model.size}." for model in models),
            ),
        ),
        verdicts=_judge(models, scores),
        notes=(
            "Rel(a) = (O(a) - O*) / (max O - O*), with O* and max O over all horizons that are feasible by the "
            "measured r: below 0 means better than any horizon. Infeasible counts as 1 in averages.",
            "Costs as in the paper: c = 1, M0 = max M for the linear cost, 0.3 max M for the ladder.",
            "The algorithm measures memory and angle of at most 6 horizons, before training.",
            "r(h) = ln(J_h/J_0)/ln(J_T/J_0): of test losses on the synthetic tasks; on the ResNet of training losses "
            "(batch norm has no statistics yet at the start), and interpolated between the measured horizons.",
        ),
    )


def _summarise(scores: Mapping[str, list[Score]]) -> str:
    sentences = []
    for title, rows in scores.items():
        averages = average(rows)
        best = min(averages, key=averages.__getitem__)
        chosen = sorted({row.horizon for row in rows})
        sentences.append(
            f"{title}: {best} has the least average Rel ({averages[best]:.2f}); the algorithm {averages[ALGORITHM]:.2f}"
            f", with horizons {', '.join(map(str, chosen))} and {infeasible(rows, ALGORITHM)} of {len(rows)} choices "
            "infeasible by the measured rate."
        )
    return " ".join(sentences)


def average(rows: list[Score]) -> dict[str, float]:
    """Mean Rel by method; an infeasible choice counts as 1."""
    return {
        method: sum(1.0 if math.isnan(row.rel[method]) else row.rel[method] for row in rows) / len(rows)
        for method in METHODS
    }


def infeasible(rows: list[Score], method: str) -> int:
    """How many choices of a method are infeasible."""
    return sum(math.isnan(row.rel[method]) for row in rows)


def _tabulate_averages(scores: Mapping[str, list[Score]]) -> Table:
    table = tuple(
        (title, *(f"{mean:.2f} ({infeasible(rows, method)})" for method, mean in average(rows).items()))
        for title, rows in scores.items()
    )
    return Table("Average Rel by model (number of infeasible choices)", ("model", *METHODS), table)


def _tabulate(title: str, rows: list[Score]) -> Table:
    table = tuple(
        (
            row.setting,
            str(row.horizon),
            str(row.best),
            *("infeasible" if math.isnan(row.rel[method]) else f"{row.rel[method]:.2f}" for method in METHODS),
        )
        for row in rows
    )
    return Table(title, ("cost, objective", "h chosen", "best h", *METHODS), table)


def _judge(models: list[Model], scores: Mapping[str, list[Score]]) -> tuple[Verdict, ...]:
    averages = {title: average(rows) for title, rows in scores.items()}
    first = [values[ALGORITHM] <= min(values.values()) + 1e-9 for values in averages.values()]
    close = [values[ALGORITHM] <= min(values.values()) + 0.1 for values in averages.values()]
    lost = {title: infeasible(rows, ALGORITHM) for title, rows in scores.items()}
    errors = {model.title: model.estimate_error() for model in models}
    agreeing = {title: sum(row.horizon == row.exact for row in rows) for title, rows in scores.items()}
    return (
        Verdict(
            "The selection algorithm has the best objective on average, against BP, FF, LoCo-3 and LoCo-5 (fig. 5)",
            grade(first, close),
            "average Rel: "
            + "; ".join(
                f"{title} {', '.join(f'{name} {value:.2f}' for name, value in values.items())}"
                for title, values in averages.items()
            ),
        ),
        Verdict(
            "What the algorithm selects is feasible (fig. 5)",
            grade([count == 0 for count in lost.values()], [lost[t] <= len(scores[t]) / 8 for t in scores]),
            "infeasible choices: " + "; ".join(f"{t} {count} of {len(scores[t])}" for t, count in lost.items()),
        ),
        Verdict(
            "cos^2 of the angle before training estimates the relative rate r(h)",
            grade(
                [error <= GOOD_ESTIMATE for error in errors.values()],
                [error <= 2 * GOOD_ESTIMATE for error in errors.values()],
            ),
            "mean distance over all horizons: " + "; ".join(f"{title} {e:.2f}" for title, e in errors.items()),
        ),
        Verdict(
            "A few measured horizons are enough: six select what all would",
            grade(
                [agreeing[t] == len(scores[t]) for t in scores], [agreeing[t] >= 0.8 * len(scores[t]) for t in scores]
            ),
            "same h: " + "; ".join(f"{title} {count} of {len(scores[title])}" for title, count in agreeing.items()),
        ),
    )


SELECTION = Experiment(
    "selection",
    "The horizon selection algorithm against fixed methods",
    lambda quick: build_cells(QUICK if quick else FULL),
    conclude,
    needs=("data/cifar-10-batches-py",),
)
