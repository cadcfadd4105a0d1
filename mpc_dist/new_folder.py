"""A folder to write results into, made before the work: what cannot be written fails first, a failure leaves none."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def make_folders(folder: Path) -> list[Path]:
    """Make the folder and those above it; the ones that were not there before, outermost first."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders, outermost first, that nobody has put anything into."""
    for one in reversed(folders):
        with suppress(OSError):
            one.rmdir()


@contextmanager
def writable_folder(folder: Path) -> Iterator[Path]:
    """Make the folder and write into it now: better than after the work. If that fails, it is taken away again."""
    made = make_folders(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield folder
    except BaseException:
        remove_empty(made)
        raise
