"""What this rank does and whom it waits for, written down so that another thread can tell it at any time.

Every wait for another rank goes through here or through the transport. It costs two assignments.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
        self.wait = None

    def give_up(self, wait: Wait, error: RuntimeError, doing: str) -> PeerError:
        """The error of a wait that failed, and the wait as others should see it."""
        seconds = time.perf_counter() - wait.since
        reason = str(error).splitlines()[0]
        self.wait = Wait(wait.peers, wait.what, wait.since, is_lost=not is_timeout(reason))
        return PeerError(f"rank {self.rank} gave up {doing} after {seconds:.1f} s: {reason}")


def is_timeout(reason: str) -> bool:
    """Whether the library says that time ran out, and not that a connection was closed."""
    return "timed out" in reason.lower() or "timeout" in reason.lower()
