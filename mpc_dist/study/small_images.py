"""CIFAR-10 made smaller, so that deep networks train in minutes on one core."""

from dataclasses import dataclass, field

import numpy as np
import torch.nn.functional as F

from mpc_dist.data import Batch, Cifar10Data, Dataset, Split
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
        return Dataset(task, self._shrink(data.train, self.num_train), self._shrink(data.test, data.test.num_samples))

    def _shrink(self, split: Split, most: int) -> Split:
        def gather(indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]], rng: np.random.Generator) -> Batch:
            images, labels = split.gather(indices, rng)
            return F.adaptive_avg_pool2d(images, self.side), labels

        return Split(min(most, split.num_samples), gather)
