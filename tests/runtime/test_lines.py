"""Lines of every rank reach rank 0 through the store, in order, without waiting, and leave nothing in it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mpc_dist.runtime.lines import MOST_BYTES, LineReceiver, LineSender, default_store, open_store
from mpc_dist.runtime.local import run_local_ranks


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dist.Store]:
    """The kinds of store through which ranks meet: torchrun's, and the one of local ranks."""
    if request.param == "tcp":
        yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        yield dist.FileStore(str(tmp_path / "store"), 1)


def receive_all(receiver: LineReceiver, count: int) -> list[tuple[int, str]]:
    """So many lines, by rank: what one connection has sent another may see a moment later."""
    found: list[tuple[int, str]] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += receiver.receive()
    return sorted(found, key=lambda line: line[0])


def test_lines_arrive_in_order_and_leave_no_key(store: dist.Store):
    before = store.num_keys()
    senders = {rank: LineSender(open_store(store, "x"), rank) for rank in (1, 2)}
    receiver = LineReceiver(open_store(store, "x"), [1, 2])
    senders[1].send(["a", "b"])
    senders[2].send(["c"])
    senders[1].send(["d — é"])
    assert receive_all(receiver, 4) == [(1, "a"), (1, "b"), (1, "d — é"), (2, "c")]
    assert receiver.unfinished == {1, 2}
    senders[1].send([], is_last=True)
    senders[2].send(["e"], is_last=True)
    assert receive_all(receiver, 1) == [(2, "e")]
    deadline = time.monotonic() + 20
    while receiver.unfinished and time.monotonic() < deadline:
        assert receiver.receive() == []
    assert receiver.unfinished == set()
    assert receiver.receive() == []
    assert store.num_keys() == before


def test_rank_0_does_not_wait_for_what_was_not_sent(store: dist.Store):
    receiver = LineReceiver(open_store(store, "x"), range(1, 8))
    start = time.monotonic()
    assert receiver.receive() == []
    assert time.monotonic() - start < 5  # the store's own timeout is 20 s, for each of 7 ranks


def test_more_lines_than_the_store_takes_at_once_arrive_whole():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines = [str(number) * (MOST_BYTES // 3) for number in range(10)]
    LineSender(open_store(store, "x"), 1).send(lines, is_last=True)
    receiver = LineReceiver(open_store(store, "x"), [1])
    assert [line for _, line in receiver.receive()] == lines
    assert not receiver.unfinished


def _exchange(rank: int) -> list[tuple[int, str]]:
    store = open_store(default_store(), "lines")
    if rank:
        LineSender(store, rank).send([f"{rank}: {number}" for number in range(3)], is_last=True)
        return []
    receiver, found = LineReceiver(store, [1, 2]), []
    deadline = time.monotonic() + 20
    while receiver.unfinished and time.monotonic() < deadline:
        found += receiver.receive()
        time.sleep(0.01)
    return found


def test_ranks_of_a_group_send_through_the_store_by_which_they_met():
    found = run_local_ranks(_exchange, 3)[0]
    assert sorted(found) == [(rank, f"{rank}: {number}") for rank in (1, 2) for number in range(3)]
