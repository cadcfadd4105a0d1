"""Image classification: the 8 x 8 digits of scikit-learn, and CIFAR-10/100 from their standard python-version folders.

CIFAR files are pickles and untrusted: see `mpc_dist/data/untrusted.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.data.dataset import Dataset, Indices, Noise, Split, view_bytes
from mpc_dist.data.untrusted import load_untrusted
from mpc_dist.task import Task
from mpc_dist.validation import check_whole

# The mean and standard deviation of ImageNet's channels: what the ResNet-56 checkpoint was trained with.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DigitsData:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, 10 classes."""

    name: Literal["digits"] = "digits"
    """Data set."""
    num_test: int = 360
    """Test samples, taken from the end."""

    def __post_init__(self) -> None:
        check_whole("data.num_test", self.num_test, minimum=1, maximum=1796)

    def load(self) -> Dataset:
        """Read them from the installed package."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ValueError("data 'digits' needs scikit-learn; pip install 'mpc_dist[digits]'") from error
        images, labels = load_digits(return_X_y=True)
        inputs = torch.from_numpy(images.reshape(-1, 1, 8, 8) / 16.0).float()
        classes, cut = torch.from_numpy(labels).long(), len(inputs) - self.num_test
        train, test = Split.of_tensors(inputs[:cut], classes[:cut]), Split.of_tensors(inputs[cut:], classes[cut:])
        return Dataset(Task("classification", (1, 8, 8), 10), train, test)


@dataclass(frozen=True)
class Cifar10Data:
    """CIFAR-10: 32 x 32 colour images in 10 classes."""

    name: Literal["cifar10"] = "cifar10"
    """Data set."""
    folder: str = "data/cifar-10-batches-py"
    """The unpacked python-version folder: data_batch_1 .. data_batch_5 and test_batch."""
    num_train_files: int = 5
    """How many of the training files to read, from the first; fewer make a subset."""
    augment: bool = False
    """Whether training images are shifted by up to 4 pixels and mirrored at random."""

    def __post_init__(self) -> None:
        check_whole("data.num_train_files", self.num_train_files, minimum=1, maximum=5)

    def load(self) -> Dataset:
        """Read the folder, checking every file."""
        names = [f"data_batch_{number}" for number in range(1, self.num_train_files + 1)]
        layout = CifarLayout(b"labels", 10, tuple(names), "test_batch", "; set data.num_train_files for a subset")
        return _load_cifar(Path(self.folder), layout, augment=self.augment, num_kept=10)


@dataclass(frozen=True)
class Cifar100Data:
    """CIFAR-100: 32 x 32 colour images in 100 classes."""

    name: Literal["cifar100"] = "cifar100"
    """Data set."""
    folder: str = "data/cifar-100-python"
    """The unpacked python-version folder: train and test."""
    augment: bool = False
    """Whether training images are shifted by up to 4 pixels and mirrored at random."""
    num_classes: int = 100
    """How many classes to keep, from the first; fewer make an easier task."""

    def __post_init__(self) -> None:
        check_whole("data.num_classes", self.num_classes, minimum=2, maximum=100)

    def load(self) -> Dataset:
        """Read the folder, checking every file."""
        layout = CifarLayout(b"fine_labels", 100, ("train",), "test")
        return _load_cifar(Path(self.folder), layout, augment=self.augment, num_kept=self.num_classes)


@dataclass(frozen=True)
class CifarLayout:
    """Where a CIFAR folder keeps what."""

    label_key: bytes
    num_classes: int
    train_files: tuple[str, ...]
    test_file: str
    remedy: str = ""
    """What else can be done about a missing file."""


def _load_cifar(folder: Path, layout: CifarLayout, *, augment: bool, num_kept: int) -> Dataset:
    """The images of the first `num_kept` classes."""
    if not folder.is_dir():
        raise ValueError(f"data.folder {folder} does not exist; unpack the python version of CIFAR there")
    for name in (*layout.train_files, layout.test_file):
        if not (folder / name).is_file():
            raise ValueError(f"CIFAR file {folder / name} is missing; unpack the python version again{layout.remedy}")

    def read(names: tuple[str, ...], *, augment: bool) -> Split:
        parts = [read_cifar_file(folder / name, layout.label_key, layout.num_classes) for name in names]
        images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        kept = labels < num_kept
        if not kept.any():
            raise ValueError(f"CIFAR files {names} in {folder} hold no image of the first {num_kept} classes")
        return ImageSplit(images[kept], labels[kept], num_random=3 if augment else 0)

    task = Task("classification", (3, 32, 32), num_kept)
    return Dataset(task, read(layout.train_files, augment=augment), read((layout.test_file,), augment=False))


def read_cifar_file(path: Path, label_key: bytes, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (N, 3, 32, 32) and labels of one file, checked."""
    content = load_untrusted(path, what="CIFAR file")
    if not isinstance(content, dict) or b"data" not in content or label_key not in content:
        raise ValueError(f"CIFAR file {path} lacks 'data' or '{label_key.decode()}'; is it of the other CIFAR?")
    images, labels = content[b"data"], content[label_key]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,):
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"CIFAR file {path} holds images as {found}; expected uint8 (N, 3072)")
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"CIFAR file {path} holds labels that are not a list of whole numbers")
    if len(values) != len(images) or not values:
        raise ValueError(f"CIFAR file {path} holds {len(images)} images but {len(values)} labels")
    if min(values) < 0 or max(values) >= num_classes:
        raise ValueError(f"CIFAR file {path} has labels {min(values)}..{max(values)}; expected 0..{num_classes - 1}")
    return images.reshape(-1, 3, 32, 32), np.array(values, dtype=np.int64)


@dataclass(frozen=True)
class ImageSplit(Split):
    """Images held as bytes, normalised when they are read."""

    images: NDArray[np.uint8]
    """(N, 3, 32, 32)."""
    labels: NDArray[np.int64]
    num_random: int = 0
    """3 for images that are shifted and mirrored at random, 0 for those that are not."""

    @property
    def num_samples(self) -> int:
        """How many images there are."""
        return len(self.images)

    def read_inputs(self, indices: Indices, noise: Noise) -> Tensor:
        """These images, with values of mean 0 and spread 1 or thereabouts."""
        mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (MEAN, STD))
        chosen = _shift_and_mirror(self.images[indices], noise) if self.num_random else self.images[indices]
        return (torch.from_numpy(chosen).float() / 255 - mean) / std

    def read_labels(self, indices: Indices) -> Tensor:
        """Their classes."""
        return torch.from_numpy(self.labels[indices])

    def read_raw(self, _: Indices) -> Iterator[bytes | memoryview]:
        """All images' own bytes, and all classes."""
        yield view_bytes(self.images)
        yield view_bytes(self.labels)


def _shift_and_mirror(images: NDArray[np.uint8], noise: Noise) -> NDArray[np.uint8]:
    """Crop each image at random from its zero-padded self, and mirror it with probability one half."""
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    shifts, mirrored = (9 * noise[:, :2]).astype(np.int64), noise[:, 2] < 0.5
    out = np.empty_like(images)
    for i, (down, right) in enumerate(shifts):
        crop = padded[i, :, down : down + 32, right : right + 32]
        out[i] = crop[:, :, ::-1] if mirrored[i] else crop
    return out
