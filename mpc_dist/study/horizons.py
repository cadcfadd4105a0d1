"""The experiment `horizons`: losses of every horizon on the paper's three tasks, and the time of a step.

The two synthetic tasks have the paper's sizes and settings; ResNet-62 is narrow, and trained briefly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpc_dist.data import Cifar10Data, DataSource, LinearData, TrigonometricData
from mpc_dist.models import BlockModel, ResLinear, ResMLP, ResNetCifar
from mpc_dist.readout import ReadoutConfig, ReadoutKind
from mpc_dist.study.cell import Cell
from mpc_dist.study.dense_cell import DenseCell
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table
from mpc_dist.study.horizon_curves import Curves, read_curves
from mpc_dist.study.horizon_figures import draw_final, draw_over_epochs, draw_step_times
from mpc_dist.study.horizon_verdicts import judge, summarise
from mpc_dist.study.step_time_cell import StepTimeCell
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.training.sections import DROP_ON_RISE, OptimizerConfig


@dataclass(frozen=True)
class DenseTask:
    """One of the two synthetic tasks, with the paper's settings."""

    model: BlockModel
    data: DataSource
    readout: ReadoutKind
    lr: float

    def build_cell(
        self, *, epochs: int, seed: int, branch_scale: float, learns_scaled: bool, extra: Iterable[WindowChoice] = ()
    ) -> DenseCell:
        """All horizons from the same weights, and other windows if asked for."""
        every = (WindowChoice("sliding", horizon) for horizon in range(1, self.model.num_blocks + 1))
        return DenseCell(
            self.model,
            self.data,
            (*every, *extra),
            paper_optimizer(self.lr),
            batch_size=100,
            epochs=epochs,
            seed=seed,
            readout=self.readout,
            branch_scale=branch_scale,
            learns_scaled=learns_scaled,
        )


@dataclass(frozen=True)
class Sizes:
    """How much of each task is run."""

    tasks: tuple[DenseTask, ...]
    epochs: int
    seeds: int
    resnet: ResNetCifar
    resnet_horizons: tuple[int, ...]
    resnet_steps: int
    resnet_seeds: int
    test_batches: int = 2


FULL = Sizes(
    tasks=(
        DenseTask(ResLinear(), LinearData(), "identity", 0.03),
        DenseTask(ResMLP(), TrigonometricData(), "pool", 0.01),
    ),
    epochs=40,
    seeds=3,
    resnet=ResNetCifar(channels=4),
    resnet_horizons=(1, 2, 3, 10, 30),
    resnet_steps=200,
    resnet_seeds=2,
)
QUICK = Sizes(
    tasks=(
        DenseTask(ResLinear(), LinearData(num_train=5_000), "identity", 0.03),
        DenseTask(ResMLP(), TrigonometricData(num_train=10_000), "pool", 0.01),
    ),
    epochs=6,
    seeds=3,
    resnet=ResNetCifar(blocks_per_group=2, channels=4),
    resnet_horizons=(1, 2, 4, 6),
    resnet_steps=40,
    resnet_seeds=1,
    test_batches=1,
)


def paper_optimizer(lr: float) -> OptimizerConfig:
    """SGD whose rate is multiplied by 0.9 when an epoch's loss rose."""
    return OptimizerConfig("sgd", lr=lr, scheduler=DROP_ON_RISE)


def build_cells(sizes: Sizes) -> dict[str, Cell]:
    """A cell per seed of a synthetic task, one per seed and horizon of the ResNet, and one per model for times."""
    cells: dict[str, Cell] = {}
    for task in sizes.tasks:
        name, factor = type(task.model).__name__, 1 / task.model.num_blocks
        # As initialised by Glorot, no horizon stands the paper's rate; an epoch shows it.
        cells[f"{name}, no factor"] = task.build_cell(epochs=1, seed=0, branch_scale=1.0, learns_scaled=False)
        for seed in range(sizes.seeds):
            for words, learns_scaled in (("factor in the model", True), ("factor at the start", False)):
                if learns_scaled and isinstance(task.model, ResMLP):
                    continue  # each takes several minutes, and this one learns slower
                cells[f"{name}, {words}, seed {seed}"] = task.build_cell(
                    epochs=sizes.epochs, seed=seed, branch_scale=factor, learns_scaled=learns_scaled
                )
        horizons = tuple(range(1, task.model.num_blocks + 1))
        cells[f"{name}, times"] = StepTimeCell(task.model, task.data, task.readout, 100, horizons)
    images = Cifar10Data(num_train_files=1)
    for seed in range(sizes.resnet_seeds):
        for horizon in sizes.resnet_horizons:
            cells[f"ResNet, h = {horizon}, seed {seed}"] = TrainingCell(
                sizes.resnet,
                images,
                WindowChoice("sliding", horizon),
                paper_optimizer(0.01),
                batch_size=32,
                steps=sizes.resnet_steps,
                seed=seed,
                readout=ReadoutConfig("pool"),
                num_evaluations=10,
                test_batches=sizes.test_batches,
            )
    cells["ResNet, times"] = StepTimeCell(sizes.resnet, images, "pool", 32, sizes.resnet_horizons, repeats=2)
    return cells


def conclude(records: Records) -> Findings:
    """Figures, tables and verdicts."""
    curves = read_curves(records)
    learned = [one for one in curves if not one.is_short]
    times = {name: record.result for name, record in records.items() if record.cell["kind"] == StepTimeCell.__name__}
    return Findings(
        summary=summarise(curves),
        tables=(*map(_tabulate, learned), _tabulate_times(times)),
        pictures=(
            Picture(
                "loss-by-horizon",
                draw_final(learned),
                "Loss at the end against the horizon: median and range of the seeds; a cross at the top is a horizon "
                f"of which a seed diverged. {_sizes(learned)}",
            ),
            Picture(
                "loss-by-epoch",
                draw_over_epochs(learned),
                f"Training loss on the way, median of the seeds. {_sizes(learned)}",
            ),
            Picture(
                "step-time",
                draw_step_times(times),
                "Time of a step against the horizon. Left and middle: simulated, one block per stage, split backwards. "
                "Right: processor time of one process over back-propagation's, measured and noisy.",
            ),
        ),
        verdicts=judge(curves),
        notes=(
            f"Sizes and seeds: {_sizes(learned)}",
            "The paper writes W = I + W~/T. 'Factor in the model' trains W~ in x + W~x/T, 'factor at the start' trains "
            "W from W~/T on; an epoch without a factor (plain Glorot weights, as the shipped configs have) is run "
            "besides. The residual MLP has the factor at the start only.",
            "The ResNet is narrow (4 channels instead of 16), on 10,000 images without augmentation, and trained for "
            "far fewer steps than the paper's 56,000; configs/resnet62_cifar10.yaml has the paper's size.",
            "Step times of one process are measured and change from run to run; all else repeats exactly.",
        ),
    )


def _sizes(curves: Iterable[Curves]) -> str:
    return " ".join(f"{one.title}: {one.size}, {one.num_seeds} seed{'s' * (one.num_seeds > 1)}." for one in curves)


def _tabulate(curves: Curves) -> Table:
    rows = tuple(
        (
            str(horizon),
            _show(curves.final("train", horizon)),
            _show(curves.final("test", horizon)),
            _show(curves.at("train", horizon, curves.early)),
        )
        for horizon in curves.horizons
    )
    columns = ("h", "training loss", "test loss", f"training loss {curves.early_words}")
    return Table(f"{curves.title}: median of {curves.num_seeds} seeds", columns, rows)


def _show(value: float) -> str:
    return f"{value:.4g}" if value < float("inf") else "diverged"


def _tabulate_times(times: Mapping[str, Mapping[str, object]]) -> Table:
    rows = []
    for name, result in times.items():
        horizons, simulated, measured = result["horizons"], result["simulated"], result["measured"]
        assert isinstance(horizons, list)
        assert isinstance(simulated, dict)
        assert isinstance(measured, list)
        for index, horizon in enumerate(horizons):
            prices = [f"{simulated[number][index]:g}" for number in ("1", "8")]
            rows.append((name.split(",")[0], str(horizon), *prices, f"{measured[index] / measured[-1]:.2f}"))
    columns = ("model", "h", "simulated, M = 1", "simulated, M = 8", "measured, over back-propagation (noisy)")
    return Table("Time of a step; simulated in forwards of a stage", columns, tuple(rows))


HORIZONS = Experiment(
    "horizons",
    "Every horizon on the paper's three tasks",
    lambda quick: build_cells(QUICK if quick else FULL),
    conclude,
    needs=("data/cifar-10-batches-py",),
)
