"""Image classification: the 8 x 8 digits of scikit-learn, and CIFAR-10/100 from their standard python-version folders.

CIFAR files are pickles and untrusted: they are read by an unpickler that admits arrays and plain containers only.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.data.dataset import Batch, Dataset, Indices, Split
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
class _Cifar:
    folder: str
    """The unpacked python-version folder."""
    augment: bool = False
    """Whether training images are shifted by up to 4 pixels and mirrored at random."""

    num_classes: ClassVar[int]
    label_key: ClassVar[bytes]
    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]

    def load(self) -> Dataset:
        """Read the folder, checking every file."""
        folder = Path(self.folder)
        if not folder.is_dir():
            raise ValueError(f"data.folder {folder} does not exist; unpack the python version of CIFAR there")
        # A subset may end early, but a file missing before one that is there is an error.
        present = [index for index, name in enumerate(self.train_files) if (folder / name).exists()]
        train_files = self.train_files[: max(present, default=0) + 1]
        train = self._read(folder, train_files, augment=self.augment)
        test = self._read(folder, (self.test_file,), augment=False)
        return Dataset(Task("classification", (3, 32, 32), self.num_classes), train, test)

    def _read(self, folder: Path, names: tuple[str, ...], *, augment: bool) -> Split:
        parts = [read_cifar_file(folder / name, self.label_key, self.num_classes) for name in names]
        images, labels = zip(*parts, strict=True)
        return _image_split(np.concatenate(images), np.concatenate(labels), augment=augment)


@dataclass(frozen=True)
class Cifar10Data(_Cifar):
    """CIFAR-10: 32 x 32 colour images in 10 classes."""

    name: Literal["cifar10"] = "cifar10"
    """Data set."""
    folder: str = "data/cifar-10-batches-py"
    """The unpacked python-version folder: data_batch_1 .. data_batch_5 and test_batch (or fewer training files)."""

    num_classes: ClassVar[int] = 10
    label_key: ClassVar[bytes] = b"labels"
    train_files: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{number}" for number in range(1, 6))
    test_file: ClassVar[str] = "test_batch"


@dataclass(frozen=True)
class Cifar100Data(_Cifar):
    """CIFAR-100: 32 x 32 colour images in 100 classes."""

    name: Literal["cifar100"] = "cifar100"
    """Data set."""
    folder: str = "data/cifar-100-python"
    """The unpacked python-version folder: train and test."""

    num_classes: ClassVar[int] = 100
    label_key: ClassVar[bytes] = b"fine_labels"
    train_files: ClassVar[tuple[str, ...]] = ("train",)
    test_file: ClassVar[str] = "test"


class RestrictedUnpickler(pickle.Unpickler):
    """Admits what numpy arrays and plain containers need, and refuses every other name."""

    ALLOWED: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("_codecs", "encode"),  # how Python 3 writes bytes into protocol 2
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return the named object if it is on the list."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no array or plain container")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar_file(path: Path, label_key: bytes, num_classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (N, 3, 32, 32) and labels of one file, checked."""
    if not path.is_file():
        raise ValueError(f"CIFAR file {path} is missing; unpack the python version again")
    try:
        with path.open("rb") as file:
            content = RestrictedUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a corrupt pickle can raise almost anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"CIFAR file {path} cannot be read: {reason}; unpack it again from its source") from error
    if not isinstance(content, dict) or b"data" not in content or label_key not in content:
        raise ValueError(f"CIFAR file {path} lacks 'data' or '{label_key.decode()}'; is it of the other CIFAR?")
    images = content[b"data"]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,):
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"CIFAR file {path} holds images as {found}; expected uint8 (N, 3072)")
    try:
        labels = np.asarray(content[label_key], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"CIFAR file {path} holds labels that are not whole numbers ({error})") from error
    if labels.shape != (len(images),) or not len(images):
        raise ValueError(f"CIFAR file {path} holds {len(images)} images but labels of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"CIFAR file {path} has labels {labels.min()}..{labels.max()}; expected 0..{num_classes - 1}")
    return images.reshape(-1, 3, 32, 32), labels


def _image_split(images: NDArray[np.uint8], labels: NDArray[np.int64], *, augment: bool) -> Split:
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, 3, 1, 1) for values in (MEAN, STD))
    classes = torch.from_numpy(labels)

    def gather(indices: Indices, rng: np.random.Generator) -> Batch:
        chosen = _shift_and_mirror(images[indices], rng) if augment else images[indices]
        pixels: Tensor = torch.from_numpy(chosen).float() / 255
        return (pixels - mean) / std, classes[torch.from_numpy(indices)]

    return Split(len(images), gather)


def _shift_and_mirror(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Crop each image at random from its zero-padded self, and mirror every other one."""
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    shifts, mirrored = rng.integers(0, 9, (len(images), 2)), rng.random(len(images)) < 0.5
    out = np.empty_like(images)
    for i, (down, right) in enumerate(shifts):
        crop = padded[i, :, down : down + 32, right : right + 32]
        out[i] = crop[:, :, ::-1] if mirrored[i] else crop
    return out
