"""The paper's two regression tasks, drawn from a seed."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mpc_dist.data.dataset import MAX_SEED, Dataset, Split
from mpc_dist.task import Task
from mpc_dist.validation import check_memory, check_real, check_whole, show

_SAMPLES = 3  # first word of a generator's key; see mpc_dist/data/dataset.py


def _split(inputs: NDArray[np.float64], labels: NDArray[np.float64]) -> Split:
    return Split.of_tensors(torch.from_numpy(inputs).float(), torch.from_numpy(labels).float())


@dataclass(frozen=True)
class _Synthetic:
    num_train: int
    """Training samples."""
    num_test: int = 1_000
    """Test samples, drawn independently of the training samples."""
    seed: int = 0
    """What the samples are drawn from."""

    def __post_init__(self) -> None:
        check_whole("data.num_train", self.num_train, minimum=1)
        check_whole("data.num_test", self.num_test, minimum=1)
        check_whole("data.seed", self.seed, minimum=0, maximum=MAX_SEED)

    def _check_size(self, numbers_per_sample: int) -> None:
        """Raise if the samples cannot be drawn into memory."""
        check_memory(
            f"data.num_train {show(self.num_train)} and data.num_test {show(self.num_test)}",
            (self.num_train + self.num_test) * numbers_per_sample * 8,
            "use fewer samples, or a smaller dimension",
        )


@dataclass(frozen=True)
class LinearData(_Synthetic):
    """y = W0 x with Gaussian W0 and x."""

    name: Literal["linear"] = "linear"
    """Data set."""
    num_train: int = 10_000
    """Training samples (the paper's 10,000)."""
    dimension: int = 10
    """Dimension of x and of y."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("data.dimension", self.dimension, minimum=1)

    def load(self) -> Dataset:
        """Draw W0 and the samples."""
        check_memory(f"data.dimension {show(self.dimension)}", self.dimension**2 * 8, "use a smaller one")
        self._check_size(2 * self.dimension)
        target, *inputs = (np.random.default_rng([_SAMPLES, self.seed, part]) for part in range(3))
        matrix = target.standard_normal((self.dimension, self.dimension))

        def draw(rng: np.random.Generator, count: int) -> Split:
            x = rng.standard_normal((count, self.dimension))
            return _split(x, x @ matrix.T)

        task = Task("regression", (self.dimension,), self.dimension)
        return Dataset(task, draw(inputs[0], self.num_train), draw(inputs[1], self.num_test))


@dataclass(frozen=True)
class TrigonometricData(_Synthetic):
    """y = (1 + eps)(cos pi x, sin pi x, cos 2 pi x, sin 2 pi x), x uniform on [-2, 2], eps ~ N(0, 0.03)."""

    name: Literal["trigonometric"] = "trigonometric"
    """Data set."""
    num_train: int = 100_000
    """Training samples (the paper's 100,000)."""
    noise_variance: float = 0.03
    """Variance of eps; one eps per sample multiplies all four components."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("data.noise_variance", self.noise_variance, minimum=0)

    def load(self) -> Dataset:
        """Draw the samples."""
        self._check_size(10)

        def draw(part: int, count: int) -> Split:
            rng = np.random.default_rng([_SAMPLES, self.seed, part])
            x = rng.uniform(-2.0, 2.0, (count, 1))
            eps = rng.normal(0.0, self.noise_variance**0.5, (count, 1))
            waves = [wave(k * np.pi * x) for k in (1, 2) for wave in (np.cos, np.sin)]
            return _split(x, (1 + eps) * np.concatenate(waves, axis=1))

        return Dataset(Task("regression", (1,), 4), draw(0, self.num_train), draw(1, self.num_test))
