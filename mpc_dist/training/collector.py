"""Makes one tracked run of the lines of all ranks."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpc_dist.training.tracking import RunInfo, Summary, Tracker, describe_run, merge_rows, name_figures, say


class Collector:
    """Reports what the lines say, from rank 0's first on."""

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self._tracker = Guarded(tracker)
        self._folder = folder
        self._summary: Summary | None = None
        self._waiting: list[tuple[int, dict[str, Any]]] = []

    def report(self, lines: Iterable[tuple[int, str]]) -> None:
        """Report these, each with its rank."""
        self._waiting += [(rank, json.loads(line)) for rank, line in lines]
        if self._summary is None:
            start = next((line for rank, line in self._waiting if rank == 0 and line["event"] == "start"), None)
            if start is None:
                return  # another rank was faster
            self._summary = Summary(describe_run(start, self._folder))
            self._tracker.start(self._summary.info)
        num_replicas = self._summary.info.topology["num_replicas"]
        rows = [name_figures(line, rank, num_replicas) for rank, line in self._waiting]
        for _, line in self._waiting:
            self._summary.add(line)
        self._waiting = []
        for row in merge_rows(row for row in rows if row):
            self._tracker.log(row)

    def show(self, name: str, figure: Path) -> None:
        """Report a picture; the run must have started."""
        self._tracker.show(name, figure)

    def finish(self, *, succeeded: bool) -> None:
        """End the run."""
        if self._summary is not None:
            self._tracker.finish(self._summary.values(), succeeded=succeeded)


class Guarded:
    """A tracker that may fail: the first error is said, and it is not called again."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker

    def start(self, info: RunInfo) -> None:
        """Begin the run."""
        self._call("start", info)

    def log(self, row: Mapping[str, Any]) -> None:
        """Report figures."""
        self._call("log", row)

    def show(self, name: str, figure: Path) -> None:
        """Report a picture."""
        self._call("show", name, figure)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """End the run."""
        self._call("finish", summary, succeeded=succeeded)

    def _call(self, name: str, *arguments: Any, **options: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, name)(*arguments, **options)
        except Exception as error:  # whatever it is, training goes on
            self._tracker = None
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            say(f"stopped ({name}: {reason}); training goes on, and the metrics files have every figure")
