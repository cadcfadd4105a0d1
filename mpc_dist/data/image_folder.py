"""Image classification from a folder of pictures with a subfolder per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpc_dist.data.dataset import Dataset
from mpc_dist.data.pixels import PictureSettings, choose_test_samples

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "validation", "valid", "val", "eval", "dev")
"""Folders and files with these names hold a split; of several test sets the first in this order is taken."""


@dataclass(frozen=True)
class ImageFolderData(PictureSettings):
    """Pictures in one subfolder per class, either in `train/` and `test/` (or `val/`), or all together."""

    name: Literal["image_folder"] = "image_folder"
    """Data set."""
    folder: str = "data/images"
    """folder/train/cat/1.png and folder/test/cat/2.png, or folder/cat/1.png and a share of it for testing."""

    def load(self) -> Dataset:
        """List the pictures; each is read when a batch needs it."""
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ValueError("data 'image_folder' needs pillow; pip install 'mpc_dist[hf]'") from error
        folder = Path(self.folder)
        if not folder.is_dir():
            raise ValueError(
                f"data.folder {folder} does not exist; give a folder with a subfolder of pictures per class"
            )
        train, test = (_find_split(folder, names) for names in (TRAIN_NAMES, TEST_NAMES))
        classes = _subfolders(train or folder)
        paths, labels = _list_pictures(folder, train or folder, classes)
        if test is not None and train is None:
            raise ValueError(f"data.folder {folder} has {test.name} but no train; name the training folder 'train'")
        if test is not None:
            _check_classes(test, classes)
            test_paths, test_labels = _list_pictures(folder, test, classes)
        else:
            first, second = choose_test_samples(len(paths), self.test_fraction, self.seed, what=f"data.folder {folder}")
            test_paths, test_labels = [paths[i] for i in second], labels[second]
            paths, labels = [paths[i] for i in first], labels[first]
        return Dataset(
            self.build_task(len(classes)),
            self.build_split(FolderPictures(self.folder, paths), labels, augment=self.augment),
            self.build_split(FolderPictures(self.folder, test_paths), test_labels, augment=False),
        )


@dataclass(frozen=True)
class FolderPictures:
    """Picture files below a folder."""

    folder: str
    names: Sequence[str]
    """Their paths in it."""

    def open(self, index: int) -> Any:
        """The picture, decoded."""
        from PIL import Image

        path = Path(self.folder) / self.names[index]
        try:
            with Image.open(path) as picture:
                picture.load()
                return picture
        except Exception as error:  # PIL raises many types for a file that is no picture
            raise ValueError(f"picture {path} cannot be read: {error}; mend or remove it") from error

    def read_raw(self, index: int) -> bytes:
        """The file's content."""
        path = Path(self.folder) / self.names[index]
        try:
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"picture {path} cannot be read: {error}; mend or remove it") from error


def _find_split(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _subfolders(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise ValueError(f"{folder} has {len(names)} subfolders; give one per class, two or more")
    return names


def _check_classes(test: Path, classes: list[str]) -> None:
    unknown = sorted({path.name for path in test.iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise ValueError(f"{test} has the class {unknown[0]!r}, which the training pictures lack; make them agree")


def _list_pictures(top: Path, folder: Path, classes: list[str]) -> tuple[list[str], Any]:
    """The pictures of a folder of classes, by their paths in the folder at the top, and their classes."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        paths += [str(path.relative_to(top)) for path in found]
        labels += [label] * len(found)
    if not paths:
        raise ValueError(f"{folder} has no pictures in its subfolders; known endings: {', '.join(sorted(SUFFIXES))}")
    return paths, np.array(labels, dtype=np.int64)
