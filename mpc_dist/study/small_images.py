"""CIFAR-10 made smaller, so that deep networks train in minutes on one core."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from mpc_dist.data import Cifar10Data, Dataset, Split
from mpc_dist.data.dataset import Indices, Noise
from mpc_dist.task import Task


@dataclass(frozen=True)
class SmallImages:
    """The first images of CIFAR-10, averaged down to fewer pixels."""

    source: Cifar10Data = field(default_factory=lambda: Cifar10Data(num_train_files=1))
    num_train: int = 10_000
    """Training images at most; all test images are kept."""
    side: int = 16
    """Pixels of a side; a divisor of 32."""

    def load(self) -> Dataset:
        """Read the source; images shrink as they are gathered."""
        data = self.source.load()
        task = Task("classification", (data.task.input_shape[0], self.side, self.side), data.task.num_outputs)
        train, test = ShrunkSplit(data.train, self.num_train, self.side), ShrunkSplit(data.test, None, self.side)
        return Dataset(task, train, test)


@dataclass(frozen=True)
class ShrunkSplit(Split):
    """The first images of another split, made smaller as they are read."""

    source: Split
    most: int | None
    """Images at most; None: all."""
    side: int

    @property
    def num_samples(self) -> int:
        """How many images there are."""
        return self.source.num_samples if self.most is None else min(self.most, self.source.num_samples)

    @property
    def num_random(self) -> int:  # type: ignore[override]
        """As many as the source's augmentation takes."""
        return self.source.num_random

    def read_inputs(self, indices: Indices, noise: Noise) -> Tensor:
        """These images, averaged down."""
        return F.adaptive_avg_pool2d(self.source.read_inputs(indices, noise), self.side)

    def read_labels(self, indices: Indices) -> Tensor:
        """Their classes."""
        return self.source.read_labels(indices)
