"""How the ranks of one attempt of a job find each other in a store that may hold what earlier attempts left.

torchrun keeps one store over all restarts. A rank that read the address which a dead one left there would wait for it
until the timeout. Counts of restarts do not help: every host has its own. So each rank leaves a word that nobody used
before, and rank 0 answers to each such word with a name under which this attempt's keys are kept. Words are numbered as
they come, so that rank 0 reads each once, however many ranks there are.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from mpc_dist.runtime.watch import PeerError

PERIOD = 0.05
"""Seconds between two looks at the store."""


def meet(store: Store, *, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """The part of the store that belongs to this attempt alone; every rank calls it."""
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        name = uuid.uuid4().hex
        _invite(store, name, num_ranks, deadline)
    else:
        word = uuid.uuid4().hex
        place = store.add("mpc_dist/hellos", 1)
        store.set(f"mpc_dist/hello/{place}", f"{rank} {word}")
        while not store.check([f"mpc_dist/welcome/{word}"]):
            _wait(deadline, f"rank {rank} waited in vain for rank 0 to join")
        name = store.get(f"mpc_dist/welcome/{word}").decode()
        store.add(f"mpc_dist/joined/{name}", 1)
    return PrefixStore(f"mpc_dist/{name}", store)


def _invite(store: Store, name: str, num_ranks: int, deadline: float) -> None:
    """Answer every word, each once, until all ranks have come; old words are answered too, and nobody hears."""
    unread: list[int] = []
    last_place = 0
    met: set[int] = set()
    while store.add(f"mpc_dist/joined/{name}", 0) < num_ranks - 1:
        places = range(last_place + 1, store.add("mpc_dist/hellos", 0) + 1)
        last_place += len(places)
        # A rank takes its place before it writes there.
        written = [place for place in (*unread, *places) if store.check([f"mpc_dist/hello/{place}"])]
        unread = [place for place in (*unread, *places) if place not in written]
        for place in written:
            rank, word = store.get(f"mpc_dist/hello/{place}").decode().split()
            store.set(f"mpc_dist/welcome/{word}", name)
            met.add(int(rank))
        missing = ", ".join(str(rank) for rank in range(1, num_ranks) if rank not in met)
        _wait(deadline, f"rank 0 waited in vain for rank {missing or '1 or another'} to join")


def _wait(deadline: float, failure: str) -> None:
    if time.monotonic() > deadline:
        raise PeerError(f"{failure}; raise parallel.timeout if it starts slowly")
    time.sleep(PERIOD)
