"""How the ranks of one attempt of a job find each other in a store that may hold what earlier attempts left.

torchrun keeps one store over all restarts. A rank that read the address which a dead one left there would wait for it
until the timeout. Counts of restarts do not help: every host has its own. So each rank leaves a word that nobody used
before, and rank 0 answers to each such word with a name under which this attempt's keys are kept.
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
        store.set(f"mpc_dist/hello/{rank}", word)
        while not store.check([f"mpc_dist/welcome/{word}"]):
            _wait(deadline, f"rank {rank} waited in vain for rank 0 to join")
        name = store.get(f"mpc_dist/welcome/{word}").decode()
        store.add(f"mpc_dist/joined/{name}", 1)
    return PrefixStore(f"mpc_dist/{name}", store)


def _invite(store: Store, name: str, num_ranks: int, deadline: float) -> None:
    """Answer every word until all ranks have come; old words are answered too, and nobody hears."""
    answered: dict[int, bytes] = {}
    while store.add(f"mpc_dist/joined/{name}", 0) < num_ranks - 1:
        for rank in range(1, num_ranks):
            word = store.get(f"mpc_dist/hello/{rank}") if store.check([f"mpc_dist/hello/{rank}"]) else None
            if word is not None and answered.get(rank) != word:
                store.set(f"mpc_dist/welcome/{word.decode()}", name)
                answered[rank] = word
        missing = ", ".join(str(rank) for rank in range(1, num_ranks) if rank not in answered)
        _wait(deadline, f"rank 0 waited in vain for rank {missing or '1 or another'} to join")


def _wait(deadline: float, failure: str) -> None:
    if time.monotonic() > deadline:
        raise PeerError(f"{failure}; raise parallel.timeout if it starts slowly")
    time.sleep(PERIOD)
