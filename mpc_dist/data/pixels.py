"""Batches of classified images that are decoded when they are gathered: resized, normalised, mirrored at random."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.data.dataset import MAX_SEED, Indices, Noise, Split, view_bytes
from mpc_dist.data.images import MEAN, STD
from mpc_dist.task import Task
from mpc_dist.validation import check_real, check_whole

_TEST_SAMPLES = 4  # first word of a generator's key; see mpc_dist/data/dataset.py


class Pictures(Protocol):
    """Where pictures are kept; picklable."""

    @property
    def names(self) -> Sequence[str]:
        """What each is called, if they have names."""

    def open(self, index: int) -> Any:
        """The picture as PIL decodes it."""

    def read_raw(self, index: int) -> bytes:
        """The picture as it is kept."""


@dataclass(frozen=True)
class PictureSettings:
    """What every source of pictures can be told."""

    size: int = 224
    """Pixels a side: pictures are scaled to cover that square, and their middle is cut out."""
    channels: int = 3
    """3: colour, 1: grey."""
    mean: tuple[float, ...] = MEAN
    """Subtracted from each channel, of values from 0 to 1; a single number serves all (default: ImageNet's)."""
    std: tuple[float, ...] = STD
    """What each channel is then divided by."""
    augment: bool = False
    """Whether training pictures are mirrored with probability one half."""
    test_fraction: float = 0.1
    """Share that is kept for testing if there is no test set, chosen by the seed."""
    seed: int = 0
    """What the test share is chosen by."""

    def __post_init__(self) -> None:
        check_whole("data.size", self.size, minimum=1)
        check_real("data.test_fraction", self.test_fraction, minimum=0, maximum=1)
        check_whole("data.seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.channels not in (1, 3):
            raise ValueError(f"data.channels {self.channels} is neither 3 (colour) nor 1 (grey); use one of them")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, 3):
                raise ValueError(f"data.{name} has {len(values)} values; give 1 or 3")
        if min(self.std) <= 0:
            raise ValueError(f"data.std {list(self.std)} has a value that is not above 0; use the channels' spread")

    def build_task(self, num_classes: int) -> Task:
        """Classification of such pictures."""
        return Task("classification", (self.channels, self.size, self.size), num_classes)

    def build_split(self, pictures: Pictures, labels: NDArray[np.int64], *, augment: bool) -> Split:
        """These pictures with their classes."""
        return PictureSplit(pictures, labels, self, num_random=1 if augment else 0)

    def decode(self, picture: Any) -> NDArray[np.uint8]:
        """The picture's pixels, channels first."""
        from PIL import ImageOps

        plain = picture.convert("RGB" if self.channels == 3 else "L")
        pixels: NDArray[np.uint8] = np.asarray(ImageOps.fit(plain, (self.size, self.size)), dtype=np.uint8)
        return np.moveaxis(pixels.reshape(self.size, self.size, self.channels), 2, 0)

    def normalise(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Pixels of several pictures as the network sees them."""
        mean, std = (self._per_channel(values) for values in (self.mean, self.std))
        return (torch.from_numpy(pixels).float() / 255 - mean) / std

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        numbers = values if len(values) == self.channels else (sum(values) / len(values),) * self.channels
        return torch.tensor(numbers, dtype=torch.float32).view(1, self.channels, 1, 1)


@dataclass(frozen=True)
class PictureSplit(Split):
    """Classified pictures that are decoded when they are read."""

    pictures: Pictures
    labels: NDArray[np.int64]
    settings: PictureSettings
    num_random: int = 0
    """1 for pictures that are mirrored at random, 0 for those that are not."""
    is_decoded: bool = True

    @property
    def num_samples(self) -> int:
        """How many pictures there are."""
        return len(self.labels)

    def read_inputs(self, indices: Indices, noise: Noise) -> Tensor:
        """These pictures, decoded and normalised."""
        pixels = np.stack([self.settings.decode(self.pictures.open(int(index))) for index in indices])
        if self.num_random:
            is_mirrored = noise[:, 0] < 0.5
            pixels[is_mirrored] = pixels[is_mirrored, :, :, ::-1]
        return self.settings.normalise(pixels)

    def read_labels(self, indices: Indices) -> Tensor:
        """Their classes."""
        return torch.from_numpy(self.labels[indices])

    def read_raw(self, few: Indices) -> Iterator[bytes | memoryview]:
        """These pictures as they are kept, and the names and classes of all: nothing is decoded."""
        for index in few:
            yield self.pictures.read_raw(int(index))
        yield from (name.encode(errors="surrogateescape") + b"\0" for name in self.pictures.names)
        yield view_bytes(self.labels)


def choose_test_samples(num_samples: int, fraction: float, seed: int, *, what: str) -> tuple[Indices, Indices]:
    """The training and the test samples, each in their order: a share chosen by the seed."""
    num_test = round(num_samples * fraction)
    if not 0 < num_test < num_samples:
        raise ValueError(
            f"{what} has no test set, and a data.test_fraction of {fraction} of its {num_samples} samples leaves "
            f"{num_samples - num_test} for training and {num_test} for testing; give more data or another fraction"
        )
    order = np.random.default_rng([_TEST_SAMPLES, seed]).permutation(num_samples)
    return np.sort(order[num_test:]), np.sort(order[:num_test])
