"""Metrics as JSON lines: a file per rank in the run folder, so that no rank waits for another to report."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends one rank's metrics to its file; `listener` is told the event and the text of every line."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        listener: Callable[[str, str], None] = lambda *_: None,
        *,
        is_continued: bool = False,
    ) -> None:
        """A new file, or one that goes on after what a run wrote before it was interrupted."""
        self._listener = listener
        folder.mkdir(parents=True, exist_ok=True)
        self._path = metrics_path(folder, rank)
        if is_continued and self._path.exists():
            # A line that was cut off by the interruption is dropped; nothing is written anew, as a disk may be full.
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        else:
            self._path.write_bytes(b"")

    def write(self, **values: Any) -> None:
        """Add a line; the time is added to it."""
        line = json.dumps({**values, "time": time.time()})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise OSError(
                f"metrics cannot be written to {self._path}: {error.strerror}; training stops here, and the same "
                "command goes on from the last checkpoint"
            ) from error
        self._listener(values["event"], line)


def forget_other_ranks(folder: Path, num_ranks: int) -> None:
    """Remove what a larger run left in this folder before."""
    for path in folder.glob("metrics-rank*.jsonl"):
        suffix = path.stem.removeprefix("metrics-rank")
        if suffix.isdigit() and int(suffix) >= num_ranks:
            path.unlink()


def metrics_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"metrics-rank{rank}.jsonl"


def read_metrics(folder: Path, rank: int, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """All whole lines of a rank's file: one that is just being written, or that a crash cut short, is left out.

    With `last_bytes`, only those within that many bytes of its end: a file grows with the run.
    """
    path = metrics_path(folder, rank)
    if not path.exists():
        return []
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        text = file.read().decode("utf-8", errors="replace")
    lines = []
    for line in text.split("\n")[:-1]:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                lines.append(content)
    return lines
