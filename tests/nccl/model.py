"""Hosts and devices as strict as NCCL may be: what can hang on some GPU, hangs here always.

A rank's host makes calls in order (`Call`). Its device has one compute stream and one stream per communicator, each
first come, first served:

- a transfer starts when it heads its stream and all that the compute stream had before it is done;
- it ends when all its participants have started: a send is a rendezvous;
- the first transfer of each direction of a pair, and the first collective of a group, block the hosts of all
  participants until all have come: that is when communicators are made;
- collectives of all communicators are one line per device, as they may need all of it;
- waiting for a transfer makes the compute stream wait; only with a timeout, or by reading a value, does the host wait;
- a wait of the whole device blocks the host until every stream of it is empty.

Nothing is ever undone, so the order in which hosts and devices take turns does not matter: what can go on, goes on, and
if nothing can, the ranks hang.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["send", "receive", "collective", "stream wait", "host wait", "read", "kernel", "device wait"]
TRANSFERS = ("send", "receive", "collective")


class Call(NamedTuple):
    """What a host asks of its device."""

    kind: Kind
    number: int = -1
    """Of a transfer: its number on this rank, by which it is waited for."""
    group: str = ""
    peer: int = -1
    """Of a send or receive: the other global rank."""
    what: str = ""
    """For the one who reads it."""
    is_on_host: bool = False
    """Whether the group's transfers are the hosts' own (gloo)."""


@dataclass
class _Transfer:
    call: Call
    rank: int
    after: int
    """How many items of the compute stream come before it."""
    partners: "tuple[_Transfer, ...] | None" = None
    is_started: bool = False
    is_done: bool = False


@dataclass
class _Rank:
    calls: Sequence[Call]
    place: int = 0
    transfers: dict[int, _Transfer] = field(default_factory=dict)
    streams: dict[object, deque[_Transfer]] = field(default_factory=dict)
    compute: deque[_Transfer | None] = field(default_factory=deque)
    """Kernels are None: they take no time."""
    num_computed: int = 0
    num_enqueued: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.compute and not any(self.streams.values())


class HangError(AssertionError):
    """No host can go on."""


class Devices:
    """The ranks of one job."""

    def __init__(
        self, calls: Sequence[Sequence[Call]], members: Mapping[str, Sequence[int]], *, one_queue: bool = False
    ) -> None:
        """`members` are the global ranks of each group; `one_queue` is CUDA_DEVICE_MAX_CONNECTIONS=1."""
        self._ranks = [_Rank(given) for given in calls]
        self._members = members
        self._one_queue = one_queue
        self._waiting: dict[object, dict[int, deque[_Transfer]]] = {}
        self._met: set[object] = set()

    def run(self) -> None:
        """Let all ranks come to their ends, or raise a HangError."""
        self._settle([len(rank.calls) for rank in self._ranks])
        self._check()

    def run_with_device_wait(self, rank: int) -> None:
        """As `run`, with a wait of the whole device before each call of this rank in turn, and after the last."""
        limits = [len(one.calls) for one in self._ranks]
        own = self._ranks[rank]
        for place in range(len(own.calls) + 1):
            limits[rank] = place
            self._settle(limits)
            if own.place < place:
                self._check()
            if not own.is_idle:
                call = own.calls[place].what or own.calls[place].kind if place < len(own.calls) else "its end"
                raise HangError(f"rank {rank} waits for its device before call {place} ({call}): {self._describe(own)}")
        self._check()

    def _check(self) -> None:
        stuck = [n for n, rank in enumerate(self._ranks) if rank.place < len(rank.calls) or not rank.is_idle]
        if stuck:
            said = [f"rank {n} at {self._at(self._ranks[n])}; {self._describe(self._ranks[n])}" for n in stuck]
            raise HangError("\n".join(said))

    def _at(self, rank: _Rank) -> str:
        return str(rank.calls[rank.place]) if rank.place < len(rank.calls) else "its end"

    def _describe(self, rank: _Rank) -> str:
        heads = [queue[0].call for queue in rank.streams.values() if queue]
        return "on the device: " + (", ".join(f"{c.kind} {c.what or c.group}" for c in heads) or "compute only")

    def _settle(self, limits: Sequence[int]) -> None:
        """Let everything go on that can, hosts no further than their limits."""
        has_moved = True
        while has_moved:
            has_moved = False
            for number, rank in enumerate(self._ranks):
                while rank.place < limits[number] and self._call(number, rank):
                    has_moved = True
                has_moved |= self._work(rank)

    def _call(self, number: int, rank: _Rank) -> bool:
        """Make the host's next call; False if it blocks."""
        call = rank.calls[rank.place]
        if call.kind in TRANSFERS:
            if not call.is_on_host and not self._has_met(number, call):
                return False
            self._enqueue(number, rank, call)
        elif call.kind == "stream wait":
            transfer = rank.transfers[call.number]
            if transfer.call.is_on_host:
                if not transfer.is_done:
                    return False
            else:
                self._compute(rank, transfer)
        elif call.kind == "host wait":
            if not rank.transfers[call.number].is_done:
                return False
        elif call.kind == "read":
            if rank.compute:
                return False
        elif call.kind == "device wait":
            if not rank.is_idle:
                return False
        else:
            self._compute(rank, None)
        rank.place += 1
        return True

    def _compute(self, rank: _Rank, transfer: _Transfer | None) -> None:
        rank.compute.append(transfer)
        rank.num_enqueued += 1

    def _has_met(self, number: int, call: Call) -> bool:
        """Whether the communicator is there; if not, this host waits here until the others come to it, too."""
        key, needed = self._meeting(number, call)
        if key in self._met:
            return True
        here = [n for n in needed if self._is_at(n, key)]
        if len(here) == len(needed):
            self._met.add(key)
            return True
        return False

    def _meeting(self, number: int, call: Call) -> tuple[object, Sequence[int]]:
        if call.kind == "collective":
            return (call.group, "collective"), self._members[call.group]
        source, target = (number, call.peer) if call.kind == "send" else (call.peer, number)
        return (call.group, source, target), (source, target)

    def _is_at(self, number: int, key: object) -> bool:
        rank = self._ranks[number]
        if rank.place >= len(rank.calls):
            return False
        call = rank.calls[rank.place]
        return call.kind in TRANSFERS and not call.is_on_host and self._meeting(number, call)[0] == key

    def _enqueue(self, number: int, rank: _Rank, call: Call) -> None:
        transfer = _Transfer(call, number, rank.num_enqueued)
        rank.transfers[call.number] = transfer
        key, needed = self._meeting(number, call)
        if call.is_on_host:
            key = (key, "host")
        queues = self._waiting.setdefault(key, {n: deque() for n in needed})
        queues[number].append(transfer)
        if all(queues.values()):
            partners = tuple(queue.popleft() for queue in queues.values())
            for one in partners:
                one.partners = partners
        if call.is_on_host:
            transfer.is_started = True
            self._end_if_all_started(transfer)
            return
        stream: object = "collectives" if call.kind == "collective" else call.group
        rank.streams.setdefault("device" if self._one_queue else stream, deque()).append(transfer)

    def _work(self, rank: _Rank) -> bool:
        """Let a device do what it can."""
        has_moved = False
        while True:
            moved = False
            while rank.compute and (rank.compute[0] is None or rank.compute[0].is_done) and self._may_compute(rank):
                rank.compute.popleft()
                rank.num_computed += 1
                moved = True
            for queue in rank.streams.values():
                while queue and queue[0].is_done:
                    queue.popleft()
                    moved = True
                if queue and not queue[0].is_started and queue[0].after <= rank.num_computed:
                    queue[0].is_started = True
                    moved = True
                    self._end_if_all_started(queue[0])
            if not moved:
                return has_moved
            has_moved = True

    def _may_compute(self, rank: _Rank) -> bool:
        """With one hardware queue, no kernel starts behind a transfer that came before it."""
        if not self._one_queue:
            return True
        queue = rank.streams.get("device")
        return not queue or queue[0].is_done or queue[0].after > rank.num_computed

    def _end_if_all_started(self, transfer: _Transfer) -> None:
        if transfer.partners is not None and all(one.is_started for one in transfer.partners):
            for one in transfer.partners:
                one.is_done = True
