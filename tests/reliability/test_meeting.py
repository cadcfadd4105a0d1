"""Ranks of one attempt find each other, whatever earlier attempts left in the store."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from mpc_dist.runtime.meeting import meet
from mpc_dist.runtime.transport import PeerError


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def attempt(server: TCPStore, ranks: list[int], num_ranks: int, seconds: float = 30) -> dict[int, Store | str]:
    found: dict[int, Store | str] = {}

    def join(rank: int) -> None:
        own = TCPStore("127.0.0.1", server.port, is_master=False)
        try:
            found[rank] = meet(own, rank=rank, num_ranks=num_ranks, timeout=timedelta(seconds=seconds))
        except PeerError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_each_attempt_has_keys_of_its_own(server: TCPStore):
    for number in range(3):
        stores = attempt(server, [0, 1, 2], 3)
        assert all(isinstance(store, Store) for store in stores.values()), stores
        assert not any(store.check(["address"]) for store in stores.values())
        stores[number].set("address", str(number))
        assert {store.get("address") for store in stores.values()} == {str(number).encode()}


def test_what_ranks_left_that_died_on_the_way_is_not_taken_for_them(server: TCPStore):
    assert "waited in vain for rank 0 to join" in str(attempt(server, [1, 2], 3, seconds=0.3)[1])
    assert "waited in vain for rank" in str(attempt(server, [0, 2], 3, seconds=0.3)[0])
    assert all(isinstance(store, Store) for store in attempt(server, [0, 1, 2], 3).values())
