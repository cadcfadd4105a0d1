"""Data sets by name: deterministic, seeded, and the same on every rank that asks."""

from typing import Protocol

from mpc_dist.data.dataset import MAX_SEED, Batch, Batches, Dataset, Split
from mpc_dist.data.hugging_face import HfImagesData, HfTextData
from mpc_dist.data.image_folder import ImageFolderData
from mpc_dist.data.images import Cifar10Data, Cifar100Data, DigitsData
from mpc_dist.data.synthetic import LinearData, TrigonometricData
from mpc_dist.data.text import TextData


class DataSource(Protocol):
    """A data set with its settings; implementations are frozen dataclasses and serve as their own configuration."""

    def load(self) -> Dataset:
        """Read or draw the samples."""


DATA: dict[str, type[DataSource]] = {
    "linear": LinearData,
    "trigonometric": TrigonometricData,
    "digits": DigitsData,
    "cifar10": Cifar10Data,
    "cifar100": Cifar100Data,
    "text": TextData,
    "hf_text": HfTextData,
    "hf_images": HfImagesData,
    "image_folder": ImageFolderData,
}

__all__ = [
    "DATA",
    "MAX_SEED",
    "Batch",
    "Batches",
    "Cifar10Data",
    "Cifar100Data",
    "DataSource",
    "Dataset",
    "DigitsData",
    "HfImagesData",
    "HfTextData",
    "ImageFolderData",
    "LinearData",
    "Split",
    "TextData",
    "TrigonometricData",
]
