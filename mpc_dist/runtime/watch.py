"""What this rank does and whom it waits for, written down so that another thread can tell it at any time.

Every wait for another rank goes through here or through the transport. It costs two assignments.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist


class PeerError(RuntimeError):
    """A neighbour did not answer in time, or answered with something else."""


@dataclass(frozen=True)
class Wait:
    """A wait for other ranks that has begun."""

    peers: tuple[int, ...]
    """Global ranks, any of which may be the one that is missing."""
    what: str
    """What it is for; the members of one collective operation say the same."""
    since: float = field(default_factory=time.perf_counter)
    is_lost: bool = False
    """Whether it ended because a connection was closed: the peer is gone, not slow."""


class Mark(Protocol):
    """What is used of a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool:
        """Whether the device has come to it; asks, and does not wait."""


def make_cuda_mark() -> Mark:
    """One behind all that this thread has given its device."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass
class _Given:
    wait: Wait
    mark: Mark
    is_done: bool = False


class DeviceWaits:
    """The waits for other ranks that a device was given. The host has gone on, and learns of a stuck one when it reads.

    So that another thread can tell where the device is, each leaves a mark behind it.
    """

    def __init__(self, make_mark: Callable[[], Mark] = make_cuda_mark) -> None:
        self._make_mark = make_mark
        self._given: deque[_Given] = deque()
        self._next: _Given | None = None
        self.present: Wait | None = None
        """Where the device was at the last look, since when it has been seen there."""

    def add(self, wait: Wait) -> None:
        """The device has been told to wait."""
        while self._given and (self._given[0].is_done or self._given[0].mark.query()):
            self._given.popleft()
        self._given.append(_Given(wait, self._make_mark()))

    def look(self) -> None:
        """Ask the device where it is; for a thread of its own, as a driver might not answer."""
        for given in list(self._given):
            if given.is_done:
                continue
            if given is not self._next:
                self._next, self.present = given, Wait(given.wait.peers, given.wait.what)
            if not given.mark.query():
                return
            given.is_done = True
        self._next = self.present = None


@dataclass
class Watch:
    """One rank's present state."""

    rank: int = 0
    phase: str = "start-up"
    """What part of a run this is."""
    wait: Wait | None = None
    """Stays as it was when a wait fails, so that it can be told afterwards."""
    describe: Callable[[], dict[str, Any]] = field(default=dict)
    """More of the state: step, action, buffers."""
    device: DeviceWaits | None = None
    """None: this thread itself waits for other ranks."""

    @property
    def present(self) -> Wait | None:
        """The wait that this rank is in: this thread's own, or the one that its device is at."""
        return self.wait or (self.device.present if self.device is not None else None)

    def end(self, wait: Wait) -> None:
        """This thread need not wait any more; its device may have to."""
        self.wait = None
        if self.device is not None:
            self.device.add(wait)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Say what part of a run the work inside is; after an error it stays said."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def waiting(
        self, group: dist.ProcessGroup | None, what: str, *, peers: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Run an operation of a group (None: of all ranks) in which this rank waits for these peers (None: the others).

        What goes wrong in it is a PeerError.
        """
        members = dist.get_process_group_ranks(group) if peers is None else peers
        self.wait = wait = Wait(tuple(rank for rank in members if rank != self.rank), what)
        try:
            yield
        except RuntimeError as error:
            raise self.give_up(wait, error, f"waiting for ranks {', '.join(map(str, wait.peers))} at {what}") from error
        self.end(wait)

    def give_up(self, wait: Wait, error: RuntimeError, doing: str) -> PeerError:
        """The error of a wait that failed, and the wait as others should see it."""
        seconds = time.perf_counter() - wait.since
        reason = str(error).splitlines()[0]
        self.wait = Wait(wait.peers, wait.what, wait.since, is_lost=not is_timeout(reason))
        return PeerError(f"rank {self.rank} gave up {doing} after {seconds:.1f} s: {reason}")


def is_timeout(reason: str) -> bool:
    """Whether the library says that time ran out, and not that a connection was closed."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()
