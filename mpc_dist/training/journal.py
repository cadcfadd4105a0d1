"""Hands the lines of every rank to one tracker on rank 0, from threads of their own: training only fills a queue.

Whatever goes wrong here is said once and ends the tracking; training and its metrics files go on.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.lines import LineReceiver, LineSender, default_store, open_store
from mpc_dist.training.tracking import (
    Draw,
    RunInfo,
    Summary,
    Tracker,
    TrackingConfig,
    describe_run,
    merge_rows,
    name_figures,
    say,
)
from mpc_dist.training.wandb_tracker import FINISH_SECONDS, WandbTracker

PERIOD = 1.0
"""Seconds between two rounds of a thread: a few large rounds cost less than many small ones."""
PERIOD_PER_RANK = 0.002
"""With very many ranks, rank 0 looks less often."""
PATIENCE = 10.0
"""Seconds that rank 0 waits at the end for the last lines of the others."""
PATIENCE_AFTER_ERROR = 2.0
UNTRACKED = frozenset({"timeline"})
"""Events whose lines stay in the metrics file: a tracker has no use for every action."""


class Worker(Protocol):
    """What a journal's thread does with the lines."""

    @property
    def period(self) -> float:
        """Seconds between two rounds."""

    @property
    def patience(self) -> float:
        """Most seconds that the end may take."""

    def pass_on(self, lines: list[str]) -> None:
        """Take what came since the last round."""

    def finish(self, lines: list[str], *, succeeded: bool) -> None:
        """Take the last lines, and end."""


class Journal:
    """Takes lines from the training thread and passes them on from another; as a context it ends with training.

    Without a worker, lines go nowhere.
    """

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker
        self._lines: deque[str] = deque()
        self._ends = threading.Event()
        self._succeeded = True
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if worker is not None:
            self._thread.start()

    def put(self, event: str, line: str) -> None:
        """Pass a line on: no more than an entry in a queue, whatever the tracker does."""
        if self._worker is not None and event not in UNTRACKED:
            self._lines.append(line)

    def close(self, *, succeeded: bool = True) -> None:
        """Pass on what is left; after the worker's patience the thread is left to itself."""
        if self._worker is None:
            return
        self._succeeded = succeeded
        self._ends.set()
        self._thread.join(self._worker.patience)
        if self._thread.is_alive():
            say(f"given up after {self._worker.patience:.0f} s; the metrics files have every figure")
        self._worker = None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(succeeded=kind is None)

    def _run(self) -> None:
        worker = self._worker
        assert worker is not None
        try:
            while not self._ends.wait(worker.period):
                worker.pass_on(self._drain())
            worker.finish(self._drain(), succeeded=self._succeeded)
        except Exception as error:  # whatever it is, training goes on
            say(f"stopped ({describe(error)}); training goes on, and the metrics files have every figure")

    def _drain(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]


class Forwarder:
    """The work of every rank but 0: send its lines to rank 0."""

    period = PERIOD
    patience = PATIENCE

    def __init__(self, sender: LineSender) -> None:
        self._sender = sender

    def pass_on(self, lines: list[str]) -> None:
        """Send these."""
        self._sender.send(lines)

    def finish(self, lines: list[str], *, succeeded: bool) -> None:  # noqa: ARG002
        """Send the last."""
        self._sender.send(lines, is_last=True)


class Collector:
    """The work of rank 0: gather the lines of all ranks and report their figures to the tracker."""

    def __init__(
        self, tracker: Tracker, folder: Path, *, receiver: LineReceiver | None = None, draw: Draw | None = None
    ) -> None:
        self._tracker = Guarded(tracker)
        self._folder = folder
        self._receiver = receiver
        self._draw = draw
        self._summary: Summary | None = None
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        num_others = 0 if receiver is None else len(receiver.unfinished)
        self.period = max(PERIOD, PERIOD_PER_RANK * num_others)
        self.patience = PATIENCE + FINISH_SECONDS + self.period

    def pass_on(self, lines: list[str]) -> None:
        """Report these, and what has arrived from the others."""
        found = [(0, line) for line in lines] + self._receive()
        self._waiting += [(rank, json.loads(line)) for rank, line in found]
        if self._summary is None:
            start = next((line for rank, line in self._waiting if rank == 0 and line["event"] == "start"), None)
            if start is None:
                return  # another rank was faster
            self._summary = Summary(describe_run(start, self._folder))
            self._tracker.start(self._summary.info)
            self._show_figures()
        num_replicas = self._summary.info.topology["num_replicas"]
        rows = [name_figures(line, rank, num_replicas) for rank, line in self._waiting]
        for _, line in self._waiting:
            self._summary.add(line)
        self._waiting = []
        for row in merge_rows(row for row in rows if row):
            self._tracker.log(row)

    def finish(self, lines: list[str], *, succeeded: bool) -> None:
        """Wait a little for the others' last lines, then end the run."""
        self.pass_on(lines)
        deadline = time.monotonic() + (PATIENCE if succeeded else PATIENCE_AFTER_ERROR)
        while self._unfinished() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.pass_on([])
        if self._unfinished():
            ranks = ", ".join(map(str, sorted(self._unfinished())))
            say(f"the last lines of ranks {ranks} did not arrive; their metrics files have them")
        if self._summary is not None:
            self._tracker.finish(self._summary.values(), succeeded=succeeded)

    def _unfinished(self) -> frozenset[int]:
        return frozenset() if self._receiver is None else self._receiver.unfinished

    def _receive(self) -> list[tuple[int, str]]:
        if self._receiver is None:
            return []
        try:
            return self._receiver.receive()
        except (RuntimeError, OSError) as error:  # the store is gone, or a rank that kept it
            say(f"the figures of other ranks no longer arrive ({describe(error)}); their metrics files have them")
            self._receiver = None
            return []

    def _show_figures(self) -> None:
        try:
            figures = {} if self._draw is None else self._draw()
        except Exception as error:  # a picture is not worth the rest
            say(f"the figures of the run cannot be drawn ({describe(error)})")
            return
        for name, path in figures.items():
            self._tracker.show(name, path)


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
            say(f"stopped ({name}: {describe(error)}); training goes on, and the metrics files have every figure")


def open_journal(
    config: TrackingConfig,
    *,
    rank: int,
    num_ranks: int,
    folder: Path,
    store: Store | None = None,
    draw: Draw | None = None,
    is_resumed: bool = False,
) -> Journal:
    """This rank's journal, as configured; to be opened once the ranks have met.

    Lines travel through the store, by default the one through which the ranks met. A resumed job goes on with the W&B
    run that it had.
    """
    if not config.wandb:
        return Journal()
    own = _open_store(store) if num_ranks > 1 else None
    if rank == 0:
        receiver = None if own is None else LineReceiver(own, range(1, num_ranks))
        return Journal(Collector(WandbTracker(config, is_resumed=is_resumed), folder, receiver=receiver, draw=draw))
    return Journal() if own is None else Journal(Forwarder(LineSender(own, rank)))


def _open_store(store: Store | None) -> Store | None:
    try:
        return open_store(store or default_store(), "mpc_dist/journal")
    except (RuntimeError, OSError) as error:
        say(f"the ranks have no store to report through ({describe(error)}); the metrics files have every figure")
        return None


def describe(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
