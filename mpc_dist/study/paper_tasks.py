"""The paper's three tasks with its settings: model, data, readout, optimizer and batch size.

Glorot's weights in the residual layers, unscaled, make both dense nets blow up at the paper's learning rates; so their
initial weights are scaled by 1/T, as the paper's theory has them (W = I + W~/T).
"""

from dataclasses import dataclass, replace

from mpc_dist.data import Cifar10Data, DataSource, LinearData, TrigonometricData
from mpc_dist.models import BlockModel, ResLinear, ResMLP, ResNetCifar
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.training.sections import DROP_ON_RISE, OptimizerConfig

DENSE_DEPTH = 15
CIFAR = "data/cifar-10-batches-py"
BACKPROP = WindowChoice("backprop")


@dataclass(frozen=True)
class PaperTask:
    """What is trained, and how."""

    title: str
    model: BlockModel
    data: DataSource
    readout: ReadoutConfig
    optimizer: OptimizerConfig
    batch_size: int
    batches_per_epoch: int

    def train(
        self,
        *,
        windows: WindowChoice = BACKPROP,
        steps: int,
        seed: int,
        num_evaluations: int,
        angles_at: tuple[int, ...] = (),
        test_batches: int | None = None,
    ) -> TrainingCell:
        """A run of it."""
        return TrainingCell(
            self.model,
            self.data,
            windows,
            self.optimizer,
            self.batch_size,
            steps,
            seed,
            self.readout,
            num_evaluations=num_evaluations,
            test_batches=test_batches,
            angles_at=angles_at,
        )


def _optimizer(rate: float) -> OptimizerConfig:
    return OptimizerConfig("sgd", lr=rate, scheduler=DROP_ON_RISE)


LINEAR = PaperTask(
    "linear residual net",
    ResLinear(num_blocks=DENSE_DEPTH, width=10, init_scale=1 / DENSE_DEPTH),
    LinearData(),
    ReadoutConfig("identity"),
    _optimizer(0.03),
    batch_size=100,
    batches_per_epoch=100,
)
MLP = PaperTask(
    "residual MLP",
    ResMLP(num_blocks=DENSE_DEPTH, width=10, init_scale=1 / DENSE_DEPTH),
    TrigonometricData(),
    ReadoutConfig("pool"),
    _optimizer(0.01),
    batch_size=100,
    batches_per_epoch=1000,
)


def resnet62(*, channels: int, blocks_per_group: int = 10) -> PaperTask:
    """On the 10,000 images of one file of CIFAR-10; the paper has 16 channels and 45,000 images."""
    return PaperTask(
        f"ResNet-{6 * blocks_per_group + 2}, {channels} channels",
        ResNetCifar(blocks_per_group=blocks_per_group, channels=channels),
        Cifar10Data(folder=CIFAR, num_train_files=1),
        ReadoutConfig("pool"),
        _optimizer(0.01),
        batch_size=32,
        batches_per_epoch=312,
    )


def without_scaling(task: PaperTask) -> PaperTask:
    """The dense task with Glorot's weights as they are."""
    assert isinstance(task.model, ResLinear | ResMLP)
    return replace(task, title=f"{task.title}, unscaled", model=replace(task.model, init_scale=1.0))
