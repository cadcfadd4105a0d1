"""Metrics as JSON lines: a file per rank in the run folder, so that no rank waits for another to report."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends one rank's metrics to its file; `listener` is told the event and the text of every line."""

    def __init__(self, folder: Path, rank: int, listener: Callable[[str, str], None] = lambda *_: None) -> None:
        self._listener = listener
        folder.mkdir(parents=True, exist_ok=True)
        self._path = metrics_path(folder, rank)
        self._path.write_text("", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Add a line; the time is added to it."""
        line = json.dumps({**values, "time": time.time()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._listener(values["event"], line)


def metrics_path(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"metrics-rank{rank}.jsonl"


def read_metrics(folder: Path, rank: int) -> list[dict[str, Any]]:
    """All lines of a rank's file; a line that is just being written is left out."""
    path = metrics_path(folder, rank)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]
