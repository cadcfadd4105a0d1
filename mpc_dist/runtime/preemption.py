"""Stops a job that is asked to by a signal: all ranks after the same step, within bounded time.

Ranks are at different steps and never meet, so they agree through the store, from threads beside training:

    signal -> any rank asks -> each rank promises to begin no step after its present one -> rank 0 takes the latest
    -> all train up to there

A promise is made by the thread, whatever the training thread waits for, so a rank that still needs a neighbour's
messages for its present step gets them. Training looks at a flag; nothing is sent until somebody asks.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.lines import call_within, default_store, open_store
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.transport import PeerError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: what was done is saved; try again later."""
EXIT_FAILED = 1
PERIOD = 1.0
"""Seconds between two looks at the store."""
PERIOD_PER_RANK = 0.002
"""With very many ranks, each looks less often."""
ANSWER_SECONDS = 10.0
"""How long a rank may take to promise: its thread looks every second, whatever training does."""
FAILURE_SECONDS = 3.0
"""How long training may take to end itself when ranks could not agree."""
GONE_SECONDS = 0.5
"""How long a rank that has failed waits to tell so, and for its thread."""
LAUNCHER_SECONDS = 5.0
"""How long a launcher may take to pass on that it ends."""
_ASKED, _PROMISE, _STOP, _GONE = "asked", "promise", "stop", "gone"


class Preempted(Exception):  # noqa: N818  (it is not an error)
    """The job was asked to stop, and has."""

    def __init__(self, step: int, *, is_saved: bool) -> None:
        self.step = step
        self.is_saved = is_saved
        kept = (
            "which is saved; the same command goes on from there" if is_saved else "which is not saved, as configured"
        )
        super().__init__(f"stopped by a signal after step {step}, {kept}")


class Preemption:
    """One rank's ear for signals and for other ranks that got one; as a context it listens."""

    def __init__(self, launch: Launch, *, after: int, grace: float, store: Store | None = None) -> None:
        """`after` is the step that training goes on from; `grace` the seconds from a signal to the end.

        Ranks agree through the store, by default the one through which they met.
        """
        self._launch = launch
        self._grace = grace
        self._store = _open(store) if launch.world_size > 1 else None
        self._period = max(PERIOD, PERIOD_PER_RANK * launch.world_size)
        self._lock = threading.Lock()
        self._present = after
        self._promise: int | None = None
        self._stop: int | None = None
        self._failure: str | None = None
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._signalled_since = threading.Event()
        self._is_saved = False
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1

    def begin(self, step: int) -> bool:
        """Whether this step is to be trained; waits for the others' promises if somebody asked to stop."""
        with self._lock:
            if self._promise is None or step <= self._promise:
                self._present = step
                return True
        self._decided.wait(self._grace)  # the thread always decides, or ends the process
        if self._stop is None:
            raise PeerError(f"rank {self._launch.rank} was asked to stop, but {self._failure or 'got no answer'}")
        return step <= self._stop

    def leave(self) -> None:
        """All is saved: end a launcher that would start the job again."""
        self._is_saved = True
        if not self._launch.restarts_left:
            return
        if self._launch.local_rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        # A rank that ends before its launcher knows would be started again.
        self._signalled_since.wait(LAUNCHER_SECONDS)

    def __enter__(self) -> "Preemption":
        self._reader, self._writer = socket.socketpair()
        if threading.current_thread() is threading.main_thread():
            for end in (self._reader, self._writer):
                end.setblocking(False)
            # Written by the interpreter as the signal arrives, even if training waits inside a library.
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, _note) for number in SIGNALS}
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closed.set()
        has_failed = kind not in (None, Preempted)
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")
        if has_failed and (store := self._store) is not None:
            with contextlib.suppress(RuntimeError, OSError):
                # Whoever waits for an answer need not wait for it.
                call_within(GONE_SECONDS, lambda: store.set(_GONE, str(self._launch.rank)))
        # The thread may wait for a store that a cut network hides; after a failure nothing depends on it any more.
        self._thread.join(GONE_SECONDS if has_failed else self._period + ANSWER_SECONDS)
        if self._handlers:
            # Once training has stopped, a late signal of the launcher must not change how this process ends.
            is_stopped = self._stop is not None
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_IGN if is_stopped else handler)
            signal.set_wakeup_fd(self._wakeup)
        if not self._thread.is_alive():
            self._reader.close()
            self._writer.close()

    def _listen(self) -> None:
        while not self._is_asked():
            if self._closed.is_set():
                return
        deadline = time.monotonic() + self._grace
        try:
            self._stop = self._agree()
        except (RuntimeError, OSError) as error:
            self._failure = " ".join(str(error).split())
            deadline = min(deadline, time.monotonic() + FAILURE_SECONDS)
        self._decided.set()
        while not self._closed.is_set():
            if self._hear_signal(max(0.0, deadline - time.monotonic())):
                self._signalled_since.set()
            if time.monotonic() >= deadline:
                self._end_process()

    def _is_asked(self) -> bool:
        """Wait a period for a signal or another rank's question."""
        if self._hear_signal(self._period):
            return True
        if self._store is None or self._closed.is_set():
            return False
        try:
            return bool(self._store.check([_ASKED]))
        except RuntimeError:  # whoever kept the store has ended, which its neighbours notice by themselves
            self._store = None
            return False

    def _hear_signal(self, seconds: float) -> bool:
        """Whether one of the signals came within that time; also returns when this is closed."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        return bool(ready) and any(number in SIGNALS for number in self._reader.recv(64))

    def _agree(self) -> int:
        """The step after which all stop."""
        with self._lock:
            self._promise = promise = self._present
        rank, num_ranks = self._launch.rank, self._launch.world_size
        if num_ranks == 1:
            return promise
        if self._store is None:
            raise PeerError("there is no store left to agree with the other ranks through")
        self._store.set(_ASKED, "1")
        self._store.set(f"{_PROMISE}/{rank}", str(promise))
        deadline = time.monotonic() + ANSWER_SECONDS
        if rank == 0:
            answer = self._gather(self._store, range(num_ranks), deadline)
            self._store.set(_STOP, json.dumps(answer))
        else:
            # Rank 0 may itself have waited for somebody as long as it could.
            _await(self._store, [_STOP], deadline + 2 * self._period)
            if not self._store.check([_STOP]):
                raise PeerError(f"rank 0 did not answer within {ANSWER_SECONDS:.0f} s")
            answer = json.loads(self._store.get(_STOP))
        if answer["silent"]:
            ranks = ", ".join(map(str, answer["silent"]))
            raise PeerError(f"rank {ranks} did not answer within {ANSWER_SECONDS:.0f} s")
        return int(answer["step"])

    @staticmethod
    def _gather(store: Store, ranks: Sequence[int], deadline: float) -> dict[str, Any]:
        keys = {rank: f"{_PROMISE}/{rank}" for rank in ranks}
        _await(store, list(keys.values()), deadline)
        silent = [rank for rank, key in keys.items() if not store.check([key])]
        step = None if silent else max(int(store.get(key)) for key in keys.values())
        return {"silent": silent, "step": step}

    def _end_process(self) -> None:
        """The time is over; whatever the other threads wait for, checkpoints on disk are whole."""
        what = self._failure or f"{self._grace:g} s were not enough to stop (checkpoints.grace)"
        if not self._is_saved:
            print(f"rank {self._launch.rank} was asked to stop, but {what}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(EXIT_PREEMPTED if self._is_saved else EXIT_FAILED)


def _note(number: int, frame: FrameType | None) -> None:
    """Nothing: that there is a handler makes the interpreter write to the socket."""


def _open(store: Store | None) -> Store | None:
    try:
        return open_store(store or default_store(), "mpc_dist/preemption")
    except (RuntimeError, OSError):
        return None


def _await(store: Store, keys: list[str], deadline: float) -> None:
    """Wait for keys; no longer than until the deadline, or until a rank says that it has failed."""
    while not store.check(keys) and time.monotonic() < deadline:
        if store.check([_GONE]):
            raise PeerError(f"rank {store.get(_GONE).decode()} has failed")
        time.sleep(0.02)
