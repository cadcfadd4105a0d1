"""A thread on every rank that notices a wait that takes too long, and answers when another rank has noticed one.

The main thread may be deep in a library's wait, where no handler of Python runs: this one still writes down what it
does. The library's own limit is a little later, so that connections still stand while the ranks answer.
"""

import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.lines import default_store
from mpc_dist.runtime.watch import PeerError, Watch
from mpc_dist.training.incident import IncidentFolder, RankReport, summarise

PERIOD = 0.5
"""Seconds between two looks."""
PATIENCE = 1.5
"""Seconds that answers are waited for."""
GRACE = timedelta(seconds=2.5)
"""How much later than the timeout the library gives up a wait."""
LAST_RESORT = 20.0
"""Seconds after the timeout at which a process ends whose wait did not: the library broke its promise."""
EXIT_STUCK = 1


EXPLAINED = (ValueError, OSError, PeerError)
"""What is told in a line; anything else is a mistake of ours."""


class RankError(ValueError):
    """What befell one rank after the ranks had met; the others may know nothing of it."""


class Watcher:
    """Watches over one rank of several; as a context it explains what goes wrong inside."""

    def __init__(self, watch: Watch, rank: int, num_ranks: int, folder: Path, *, timeout: float) -> None:
        """All ranks call it together; `folder` is the run's, `timeout` the seconds after which a wait is a stall.

        They need to have joined, no more: a rank may be stuck in making a connection.
        """
        self._watch = watch
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout = timeout
        name = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        if num_ranks > 1:
            with watch.waiting(None, "the name of the job"):
                name = _agree(default_store(), rank, name)
        self._incident = IncidentFolder(folder / "stall" / name)
        self._has_reported = False
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._looks = threading.Thread(target=self._look_at_device, name="device", daemon=True)
        if num_ranks > 1:
            self._thread.start()
            self._looks.start()

    def explain(self, error: Exception) -> str:
        """What befell this rank, written down for the others, and who is to blame as far as can be told."""
        is_wait = isinstance(error, PeerError) and self._watch.wait is not None
        with self._lock:
            try:
                self._incident.write(self._report(None if is_wait else str(error)))
                self._incident.ask(f"rank {self._rank}: {error}")
                self._has_reported = True
                self._conclude()
                headline = self._incident.read_headline(patience=PATIENCE)
            except OSError as problem:
                headline = f"what the ranks did could not be written down: {problem}"
        text = str(error) if str(error).startswith(f"rank {self._rank}") else f"rank {self._rank}: {error}"
        return text if headline is None else f"{text} ({headline}; see {self._incident.path})"

    def close(self) -> None:
        """Stop watching."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(2 * PATIENCE + PERIOD)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        """Explain an error while connections stand: once they are closed, it would look like a death to the others."""
        if self._num_ranks > 1 and isinstance(error, EXPLAINED) and not isinstance(error, RankError):
            raise RankError(self.explain(error)) from error

    def _run(self) -> None:
        while not self._ends.wait(PERIOD):
            wait = self._watch.present
            waited = 0.0 if wait is None else time.perf_counter() - wait.since
            try:
                with self._lock:
                    self._look(waited)
            except OSError as problem:
                _say(f"rank {self._rank}: what it does could not be written down: {problem}")
                self._has_reported = True
            if waited > self._timeout + LAST_RESORT and self._watch.present is wait:
                _say(f"rank {self._rank}: ended by force {waited:.0f} s into a wait: {wait}")
                os._exit(EXIT_STUCK)

    def _look_at_device(self) -> None:
        """In a thread of its own, which holds nothing: a driver that is stuck may not answer it."""
        with suppress(RuntimeError):  # of a device that has failed: the thread that trains will say so
            while not self._ends.wait(PERIOD):
                if self._watch.device is not None:
                    self._watch.device.look()

    def _look(self, waited: float) -> None:
        if self._has_reported:
            return
        if self._incident.is_asked:
            self._incident.write(self._report())
            self._has_reported = True
        elif waited > self._timeout:
            report = self._report()
            self._incident.write(report)
            self._incident.ask(f"rank {self._rank}: {report.describe()}")
            self._has_reported = True
            self._conclude()

    def _conclude(self) -> None:
        """Wait for the others' answers, and if no other rank does, make the summary of them and print it."""
        wait = self._watch.wait
        # A peer whose connection is closed has written by then what it had to say.
        lost = wait.peers if wait is not None and wait.is_lost and len(wait.peers) == 1 else ()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and not self._incident.is_summarised:
            if all(self._incident.has(rank) for rank in range(self._num_ranks) if rank not in lost):
                break
            time.sleep(0.05)
        if self._incident.claim_summary():
            reports = self._incident.read(self._num_ranks)
            text = summarise(reports, self._num_ranks, asked_by=self._incident.asked_by())
            self._incident.write_summary(text)
            _say(f"{text}\nsee {self._incident.path}")

    def _report(self, error: str | None = None) -> RankReport:
        wait = self._watch.present if error is None else None
        state = self._describe()
        seconds = state.get("seconds_since_last_action") if wait is None else time.perf_counter() - wait.since
        return RankReport(
            rank=self._rank,
            phase=self._watch.phase,
            waits_for=() if wait is None else wait.peers,
            waits_at=None if wait is None else wait.what,
            seconds=None if seconds is None else round(seconds, 3),
            is_lost=wait is not None and wait.is_lost,
            error=error,
            state=state,
            stacks=read_stacks(),
        )

    def _describe(self) -> dict[str, Any]:
        try:
            return self._watch.describe()
        except RuntimeError as problem:  # the other thread changed what was being read
            return {"unknown": str(problem)}


def _agree(store: Store, rank: int, name: str) -> str:
    """Rank 0's name; without a message, for which a connection would have to be made."""
    place = store.add(f"mpc_dist/jobs/{rank}", 1)  # one process group may see several jobs
    if rank == 0:
        store.set(f"mpc_dist/job/{place}", name)
    return store.get(f"mpc_dist/job/{place}").decode()


def read_stacks() -> dict[str, list[str]]:
    """Where every thread of this process is: file, line and function of each call, no values."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')} ({ident})": [
            f"{call.filename}:{call.lineno} {call.name}" for call in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }


def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
