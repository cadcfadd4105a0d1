"""Moves tensors between neighbouring ranks: the only caller of torch's point-to-point operations.

There is one channel per direction and pair of neighbours. Messages have no tags and are matched by order, so a
channel's receives come in the order of its sends: both are read off one schedule.
"""

import ctypes
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mpc_dist.precision import FULL, Precision
from mpc_dist.runtime.watch import PeerError as PeerError
from mpc_dist.runtime.watch import Wait, Watch
from mpc_dist.schedule.action import Action

ACTIVATIONS, ADJOINTS = "activations", "adjoints"
_USES_OF_FREE = 2
"""How many hold the memory of a buffer that only its channel knows: the channel, and who asks."""


class Transport(Protocol):
    """What an executor needs to exchange tensors with its neighbours."""

    def expect(self, receives: Iterable[Action]) -> None:
        """Say which receives this step has, in order, so that they can be posted ahead."""

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send without waiting."""

    def is_ready(self, action: Action) -> bool:
        """Whether receiving would succeed, or at least wait for no one in this thread."""

    def receive(self, action: Action) -> Tensor:
        """The next message of the action's channel; waits for it."""


@dataclass
class InMemoryTransport:
    """Queues between the ranks of one process."""

    rank: int
    queues: dict[tuple[int, int, str], deque[tuple[Action, Tensor]]]
    """By (sender, receiver, kind); shared by all ranks."""
    precision: Precision = FULL
    """What it says of messages is done to them, as between processes."""

    def expect(self, receives: Iterable[Action]) -> None:
        """Nothing to post."""

    def send(self, action: Action, tensor: Tensor) -> None:
        """Put a copy into the queue: the sender may change its tensor afterwards."""
        down = kind_of(action) == ACTIVATIONS
        key = self.rank, self.rank + (1 if down else -1), kind_of(action)
        self.queues.setdefault(key, deque()).append((action, self.precision.round(tensor).clone()))

    def _queue(self, action: Action) -> deque[tuple[Action, Tensor]]:
        sender = self.rank + (-1 if kind_of(action) == ACTIVATIONS else 1)
        return self.queues.setdefault((sender, self.rank, kind_of(action)), deque())

    def is_ready(self, action: Action) -> bool:
        """Whether the message is there."""
        return bool(self._queue(action))

    def receive(self, action: Action) -> Tensor:
        """Take the message."""
        return self._queue(action).popleft()[1]


class Mark(NamedTuple):
    """A quiet NaN that no computation makes, written at a buffer's end before the receive.

    gloo silently accepts a message that is shorter than the buffer: if the mark is still there, it was short.
    """

    kind: type[ctypes.c_int64 | ctypes.c_int32 | ctypes.c_int16]
    bits: int


_MARKS = {
    torch.float64: Mark(ctypes.c_int64, 0x7FF8_0BAD_C0DE_0BAD),
    torch.float32: Mark(ctypes.c_int32, 0x7FC0_BADC),
    torch.bfloat16: Mark(ctypes.c_int16, 0x7FDB),
    torch.float16: Mark(ctypes.c_int16, 0x7E5B),
}


def _end_of(buffer: Tensor, mark: Mark) -> ctypes.c_int64 | ctypes.c_int32 | ctypes.c_int16:
    """The last element of a CPU buffer, as an integer in its memory: four times as fast as by torch's operations."""
    return mark.kind.from_address(buffer.data_ptr() + buffer.nbytes - ctypes.sizeof(mark.kind))


@dataclass(frozen=True)
class Manners:
    """How a backend wants to be asked for messages."""

    posted_ahead: int
    """Receives per channel that are posted before the program comes to them."""
    host_waits: bool
    """Whether this thread waits for a message; if not, what is computed from it does, on the device."""


GLOO = Manners(posted_ahead=2, host_waits=True)
NCCL = Manners(posted_ahead=0, host_waits=False)
"""A receive that waits is a kernel that runs, and whatever waits for the whole device (a kernel to be loaded, memory to
be freed) waits for it: so none is posted before its message is needed, when all that this depends on is under way."""


def manners_of(device: torch.device) -> Manners:
    """Those of the backend that a device's tensors travel by."""
    return GLOO if device.type == "cpu" else NCCL


@dataclass(frozen=True)
class Message:
    """A tensor under way, kept alive until it has arrived."""

    action: Action
    tensor: Tensor
    work: dist.Work


@dataclass
class Channel:
    """One direction between this rank and a neighbour."""

    peer: int
    """The neighbour's global rank."""
    group: dist.ProcessGroup
    """Each direction has a communicator of its own: NCCL would otherwise serialise the two."""
    shape: torch.Size
    dtype: torch.dtype
    """In which messages travel."""
    device: torch.device
    state_dtype: torch.dtype | None = None
    """Of what is sent and received; None: that of messages."""
    expected: deque[Action] = field(default_factory=deque)
    posted: deque[Message] = field(default_factory=deque)
    sent: deque[Message] = field(default_factory=deque)
    is_used: bool = False
    """Whether a message was ever expected on it."""
    buffers: list[Tensor] = field(default_factory=list)
    """All that were made for receiving; as many as were ever in use at once."""

    def __post_init__(self) -> None:
        self.rank_in_group = dist.get_group_rank(self.group, self.peer)
        self.state_dtype = self.state_dtype or self.dtype
        self.mark = _MARKS.get(self.dtype) if self.device.type == "cpu" and self.shape.numel() else None

    def take_buffer(self) -> Tensor:
        """One that nobody uses any more.

        On a device, its last users are then enqueued, and whatever is received into it waits for them there.
        """
        for buffer in self.buffers:
            if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == _USES_OF_FREE:
                return buffer.detach()  # another tensor on the same memory, which is in use as long as this one
        self.buffers.append(torch.empty(self.shape, dtype=self.dtype, device=self.device))
        return self.buffers[-1].detach()


class DistributedTransport:
    """Point-to-point messages of torch.distributed; sends are asynchronous, receives as the backend wants them."""

    MOST_UNDER_WAY = 16
    """Sends per channel that may be unfinished: how far this rank can run ahead of a slower neighbour."""

    def __init__(
        self,
        channels: dict[tuple[str, str], Channel],
        *,
        rank: int,
        timeout: timedelta,
        watch: Watch | None = None,
        manners: Manners = GLOO,
    ) -> None:
        self._manners = manners
        self._channels = channels
        """By (\"send\" or \"receive\", kind)."""
        self._rank = rank
        self._timeout = timeout
        self._watch = watch or Watch(rank)
        self.waiting_for: dict[int, float] = {}
        """Seconds spent waiting for each neighbour so far."""

    @property
    def seconds_waiting(self) -> float:
        """Time spent waiting so far."""
        return sum(self.waiting_for.values())

    @property
    def sent_bytes(self) -> int:
        """Size of the messages that the neighbours have not taken yet, as far as is known."""
        return sum(message.tensor.nbytes for channel in self._channels.values() for message in list(channel.sent))

    @property
    def posted_bytes(self) -> int:
        """Size of the buffers that wait for messages, on the channels that have had any."""
        used = [channel for (direction, _), channel in self._channels.items() if direction == "receive"]
        sizes = [channel.shape.numel() * channel.dtype.itemsize for channel in used if channel.is_used]
        return max(1, self._manners.posted_ahead) * sum(sizes)

    def expect(self, receives: Iterable[Action]) -> None:
        """Post the first receives of each channel, if any are posted ahead."""
        for action in receives:
            channel = self._channels["receive", kind_of(action)]
            channel.expected.append(action)
            channel.is_used = True
        for (direction, _), channel in self._channels.items():
            if direction == "receive":
                self._post(channel)

    def _post(self, channel: Channel, number: int | None = None) -> None:
        """Post receives until so many wait."""
        number = self._manners.posted_ahead if number is None else number
        while channel.expected and len(channel.posted) < number:
            buffer = channel.take_buffer()
            if channel.mark is not None:
                _end_of(buffer, channel.mark).value = channel.mark.bits
            action = channel.expected.popleft()
            channel.posted.append(Message(action, buffer, channel.group.recv([buffer], channel.rank_in_group, 0)))

    def send(self, action: Action, tensor: Tensor) -> None:
        """Send without waiting; the tensor must have the shape that was agreed on."""
        channel = self._channels["send", kind_of(action)]
        if tensor.shape != channel.shape or tensor.dtype != channel.state_dtype:
            raise PeerError(
                f"rank {self._rank} would send {tuple(tensor.shape)} {tensor.dtype} at {action}, but rank "
                f"{channel.peer} expects {tuple(channel.shape)} {channel.state_dtype}; every micro-batch must have "
                "one shape"
            )
        # gloo never says that a send is complete before it is waited for.
        while not self._manners.host_waits and channel.sent and channel.sent[0].work.is_completed():
            channel.sent.popleft()
        while len(channel.sent) >= self.MOST_UNDER_WAY:
            self._finish_oldest_send(channel)
        tensor = tensor.to(channel.dtype).contiguous()
        channel.sent.append(Message(action, tensor, channel.group.send([tensor], channel.rank_in_group, 0)))

    def is_ready(self, action: Action) -> bool:  # noqa: ARG002
        """Receiving waits for another process, so it may always be tried."""
        return True

    def receive(self, action: Action) -> Tensor:
        """Wait for the next message of the channel, at most the timeout, and check that it is whole."""
        channel = self._channels["receive", kind_of(action)]
        self._post(channel, max(1, self._manners.posted_ahead))
        message = channel.posted.popleft()
        assert message.action == action, (message.action, action)
        self._wait(message.work, action, channel, "receiving from", by_host=self._manners.host_waits)
        if channel.mark is not None and _end_of(message.tensor, channel.mark).value == channel.mark.bits:
            raise PeerError(f"rank {self._rank} got a short message at {action} from rank {channel.peer}")
        self._post(channel)
        return message.tensor.to(channel.state_dtype)

    def close(self) -> None:
        """Wait until everything sent has been taken."""
        for (direction, _), channel in self._channels.items():
            while direction == "send" and channel.sent:
                self._finish_oldest_send(channel)

    def _finish_oldest_send(self, channel: Channel) -> None:
        message = channel.sent.popleft()
        self._wait(message.work, message.action, channel, "sending to", by_host=True)

    def _wait(self, work: dist.Work, action: Action, channel: Channel, doing: str, *, by_host: bool) -> None:
        self._watch.wait = wait = Wait((channel.peer,), f"{doing} rank {channel.peer} at {action}")
        try:
            if by_host:
                work.wait(self._timeout)
            else:
                work.wait()  # the device does, and goes on with what needs no message
        except RuntimeError as error:
            raise self._watch.give_up(wait, error, f"{wait.what} (micro-batch {action.microbatch})") from error
        self._watch.end(wait)
        waited = time.perf_counter() - wait.since
        self.waiting_for[channel.peer] = self.waiting_for.get(channel.peer, 0.0) + waited


def kind_of(action: Action) -> str:
    """Which of the two kinds of messages a send or receive moves."""
    return ACTIVATIONS if action.op.value in ("SA", "RA") else ADJOINTS


def connect_in_memory(num_ranks: int, precision: Precision = FULL) -> Sequence[InMemoryTransport]:
    """A transport for each rank of one process."""
    queues: dict[tuple[int, int, str], deque[tuple[Action, Tensor]]] = {}
    return [InMemoryTransport(rank, queues, precision) for rank in range(num_ranks)]
