"""Hands the lines of every rank to one tracker, from threads of their own: training only fills a queue.

    rank 1 ... n: queue -> thread -> store -+
    rank 0:       queue ------------------- +-> thread -> pipe -> reporting process -> W&B

Whatever goes wrong here is said once and ends the tracking; training and its metrics files go on.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.lines import LineReceiver, LineSender, default_store, open_store
from mpc_dist.training.tracking import Draw, TrackingConfig, say
from mpc_dist.training.wandb_tracker import FINISH_SECONDS, INIT_SECONDS

PERIOD = 1.0
"""Seconds between two rounds of a thread: a few large rounds cost less than many small ones."""
PERIOD_PER_RANK = 0.002
"""With very many ranks, rank 0 looks less often."""
PATIENCE = 10.0
"""Seconds that rank 0 waits at the end for the last lines of the others."""
PATIENCE_AFTER_ERROR = 2.0
PROCESS_PATIENCE = INIT_SECONDS + FINISH_SECONDS + 10.0
"""Seconds that the reporting process may take to end; it is quick unless the network is not."""
UNTRACKED = frozenset({"timeline"})
"""Events whose lines stay in the metrics file: a tracker has no use for every action."""
IN_FILES = "the metrics files have every figure"


class Worker(Protocol):
    """What a journal's thread does with the lines."""

    period: float
    """Seconds between two rounds."""
    patience: float
    """Most seconds that the end should take."""

    def pass_on(self, lines: list[str]) -> None:
        """Take what came since the last round."""

    def finish(self, lines: list[str], *, succeeded: bool) -> None:
        """Take the last lines, and end within bounds."""


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
        """Pass on what is left."""
        if self._worker is None:
            return
        self._succeeded = succeeded
        self._ends.set()
        self._thread.join(self._worker.patience)
        if self._thread.is_alive():
            say(f"given up after {self._worker.patience:.0f} s; {IN_FILES}")
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
            say(f"stopped ({describe(error)}); training goes on, and {IN_FILES}")

    def _drain(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]


class Forwarder:
    """The work of every rank but 0: send its lines to rank 0."""

    def __init__(self, sender: LineSender) -> None:
        self.period = PERIOD
        self.patience = PERIOD + PATIENCE
        self._sender = sender

    def pass_on(self, lines: list[str]) -> None:
        """Send these."""
        self._sender.send(lines)

    def finish(self, lines: list[str], *, succeeded: bool) -> None:  # noqa: ARG002
        """Send the last."""
        self._sender.send(lines, is_last=True)


class Gatherer:
    """The work of rank 0: gather the lines of all ranks and write them to the reporting process."""

    def __init__(
        self,
        tracking: TrackingConfig,
        folder: Path,
        *,
        receiver: LineReceiver | None = None,
        draw: Draw | None = None,
        is_resumed: bool = False,
    ) -> None:
        self._begin = ("begin", str(folder), asdict(tracking), is_resumed)
        self._receiver = receiver
        self._draw = draw
        self._process: subprocess.Popen[str] | None = None
        self._has_begun = False
        self.period = max(PERIOD, PERIOD_PER_RANK * len(self._unfinished()))
        self.patience = self.period + 2 * PATIENCE + PROCESS_PATIENCE

    def pass_on(self, lines: list[str]) -> None:
        """Write these, and what has arrived from the others."""
        if not self._has_begun:
            self._has_begun = True
            command = [sys.executable, "-m", "mpc_dist.training.reporter"]
            # A session of its own: Ctrl-C ends training, and the end of its input ends the process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
            )
            self._write([self._begin])
        self._write([("line", rank, line) for rank, line in [*((0, line) for line in lines), *self._receive()]])
        if lines and self._draw is not None:
            self._write_figures(self._draw)
            self._draw = None

    def finish(self, lines: list[str], *, succeeded: bool) -> None:
        """Wait a little for the others' last lines, then for the process to end."""
        self.pass_on(lines)
        deadline = time.monotonic() + (PATIENCE if succeeded else PATIENCE_AFTER_ERROR)
        while self._unfinished() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.pass_on([])
        if self._unfinished():
            ranks = ", ".join(map(str, sorted(self._unfinished())))
            say(f"the last lines of ranks {ranks} did not arrive; their metrics files have them")
        self._write([("end", succeeded)])
        if self._process is None:
            return
        try:
            self._process.communicate(timeout=PROCESS_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            say(f"given up after {PROCESS_PATIENCE:.0f} s; {IN_FILES}")
            return
        if self._process.returncode:
            self._say_ended(self._process.returncode)

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

    def _write(self, messages: list[Any]) -> None:
        """Write to the process, if there still is one; lines of other ranks are taken from the store all the same."""
        if self._process is None or not messages:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
            self._process.stdin.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._say_ended(self._process.wait(PATIENCE))
            self._process = None

    def _say_ended(self, code: int) -> None:
        say(f"stopped (its process ended with exit code {code}); training goes on, and {IN_FILES}")

    def _write_figures(self, draw: Draw) -> None:
        try:
            figures = draw()
        except Exception as error:  # a picture is not worth the rest
            say(f"the figures of the run cannot be drawn ({describe(error)})")
            return
        self._write([("figure", name, str(path)) for name, path in figures.items()])


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
        return Journal(Gatherer(config, folder, receiver=receiver, draw=draw, is_resumed=is_resumed))
    return Journal() if own is None else Journal(Forwarder(LineSender(own, rank)))


def _open_store(store: Store | None) -> Store | None:
    try:
        return open_store(store or default_store(), "mpc_dist/journal")
    except (RuntimeError, OSError) as error:
        say(f"the ranks have no store to report through ({describe(error)}); {IN_FILES}")
        return None


def describe(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
