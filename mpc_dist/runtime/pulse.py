"""Tells which ranks are silent: each leaves a sign of life in the store, from a thread beside everything else.

A rank that waits in vain often waits for one that waits itself. Whoever gives up looks here for the one to blame.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.lines import call_within, default_store, open_store
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.transport import PeerError

PERIOD = 0.5
"""Seconds between two signs of life."""
PERIOD_PER_RANK = 0.002
"""With very many ranks, each gives them less often."""
LOOK_PERIODS = 5
"""For how many periods the others are watched."""
_LEFT = "left"


class Pulse:
    """One rank's signs of life; as a context it gives them. Alone, or without a store, it gives none."""

    def __init__(self, launch: Launch, *, store: Store | None = None) -> None:
        self._rank = launch.rank
        self._others = [rank for rank in range(launch.world_size) if rank != launch.rank]
        self._store = None
        if self._others:
            try:
                self._store = open_store(store or default_store(), "mpc_dist/pulse")
            except (RuntimeError, OSError):
                return  # nobody will be blamed
        self._period = max(PERIOD, PERIOD_PER_RANK * launch.world_size)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._closed.set()
            self._thread.join(2 * self._period)

    def find_silent(self) -> Sequence[int]:
        """The ranks that give no sign of life for a while and have not said that they end; takes that while."""
        if self._store is None:
            return []
        try:
            return call_within(2 * LOOK_PERIODS * self._period, self._compare)
        except (RuntimeError, OSError):
            return []

    def _compare(self) -> Sequence[int]:
        before = self._read()
        time.sleep(LOOK_PERIODS * self._period)
        after = self._read()
        return [rank for rank in self._others if before[rank] == after[rank] != _LEFT]

    def _read(self) -> dict[int, str | None]:
        store = self._store
        assert store is not None
        return {rank: store.get(str(rank)).decode() if store.check([str(rank)]) else None for rank in self._others}

    def _beat(self) -> None:
        assert self._store is not None
        number = 0
        try:
            while True:
                self._store.set(str(self._rank), str(number))
                number += 1
                if self._closed.wait(self._period):
                    self._store.set(str(self._rank), _LEFT)
                    return
        except (RuntimeError, OSError):
            return  # whoever kept the store has ended


@contextmanager
def blame_silent(launch: Launch) -> Iterator[None]:
    """Whatever is raised within by waiting for other ranks also names those that are silent."""
    with Pulse(launch) as pulse:
        try:
            yield
        except RuntimeError as error:
            silent = pulse.find_silent()
            if not silent:
                raise
            ranks = ", ".join(map(str, silent))
            raise PeerError(f"no sign of life of rank {ranks}; rank {launch.rank} fails: {error}") from error
