"""Carries lines of text from every rank to rank 0 through the process group's store: no collective, no barrier.

A batch of lines is one key of its sender, numbered in order; rank 0 takes it and deletes it, so the store does not
grow. Nothing here is called by the thread that trains.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

T = TypeVar("T")
STORE_TIMEOUT = timedelta(seconds=20)
"""How long one access to the store may take before it counts as lost."""
MOST_BYTES = 1 << 20
"""Of one batch: the store refuses values of several MiB."""


def open_store(store: Store, name: str) -> Store:
    """A connection of one's own to that store, for keys below `name`.

    The group uses its own connection meanwhile: two threads on one would wait for each other.
    """
    own: Store = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(STORE_TIMEOUT)
    return PrefixStore(name, own)


def default_store() -> Store:
    """The store through which the ranks of the process group met."""
    return _get_default_store()


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns, or a TimeoutError: while a network is cut, the store's own calls wait for it."""
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(call())
        except Exception as error:  # raised where it is waited for
            answers.put(error)

    threading.Thread(target=answer, name="store", daemon=True).start()
    try:
        answered = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"the store did not answer within {seconds:g} s") from None
    if isinstance(answered, Exception):
        raise answered
    return answered


class LineSender:
    """One rank's way to rank 0."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._number = 0

    def send(self, lines: Sequence[str], *, is_last: bool = False) -> None:
        """Leave the lines for rank 0; `is_last` says that no more will come."""
        batches = list(_split(lines)) or ([[]] if is_last else [])
        for index, batch in enumerate(batches):
            content = {"lines": batch, "is_last": is_last and index == len(batches) - 1}
            self._store.set(_key(self._rank, self._number), json.dumps(content))
            self._number += 1


class LineReceiver:
    """Rank 0's end: takes what has arrived, and never waits for what has not."""

    def __init__(self, store: Store, ranks: Iterable[int]) -> None:
        self._store = store
        self._next = dict.fromkeys(ranks, 0)
        self._open = set(self._next)

    @property
    def unfinished(self) -> frozenset[int]:
        """The ranks that have not said that they are done."""
        return frozenset(self._open)

    def receive(self) -> list[tuple[int, str]]:
        """Every line that has arrived, with its rank; a rank's lines are in order."""
        found: list[tuple[int, str]] = []
        for rank in sorted(self._open):
            while rank in self._open and self._store.check([_key(rank, self._next[rank])]):
                key = _key(rank, self._next[rank])
                content = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._next[rank] += 1
                found += [(rank, line) for line in content["lines"]]
                if content["is_last"]:
                    self._open.remove(rank)
        return found


def _key(rank: int, number: int) -> str:
    return f"{rank}/{number}"


def _split(lines: Sequence[str]) -> Iterator[list[str]]:
    """The lines in batches that the store takes."""
    batch: list[str] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > MOST_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch
