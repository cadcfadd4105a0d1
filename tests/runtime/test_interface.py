"""Which interface gloo listens at; `tests/reliability/test_hosts.py` shows it on two hosts."""

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mpc_dist.runtime.interface import find_interface, find_interface_of, find_loopback, find_route
from mpc_dist.runtime.mesh import Launch, join
from mpc_dist.runtime.watch import PeerError

SECONDS = timedelta(seconds=20)


def test_any_loopback_address_is_this_host():
    for name in ("127.0.0.1", "127.0.1.1", "localhost"):
        theirs, own = find_route(name)
        assert theirs == own, name


def test_an_interface_is_found_by_its_address():
    assert find_interface_of("127.0.0.1") == find_loopback()
    assert find_interface_of("192.0.2.1") is None


def find_on_each_rank(master: str, num_ranks: int, come: int) -> list[str | None]:
    store, found = dist.HashStore(), []

    def find() -> None:
        limit = SECONDS if come == num_ranks else timedelta(seconds=0.3)
        found.append(find_interface(store, master=master, num_ranks=num_ranks, timeout=limit))

    threads = [threading.Thread(target=find) for _ in range(come)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    return found


def test_ranks_that_are_all_beside_the_store_take_the_loopback():
    assert find_on_each_rank("127.0.0.1", 3, 3) == [find_loopback()] * 3


def test_while_a_rank_is_missing_nobody_guesses():
    assert find_on_each_rank("127.0.0.1", 3, 2) == [None, None]


def test_an_unknown_master_is_named(monkeypatch):
    monkeypatch.setattr("mpc_dist.runtime.mesh.rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PeerError, match=r"no way to MASTER_ADDR 'no-such-host\.invalid'"):
        join(Launch(0, 2), "cpu", 5.0)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
