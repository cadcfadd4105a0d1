"""Every rule that the product keeps for NCCL's sake: without it, the strict model hangs.

What is changed is the product's own choice; the rest of it runs as it is, each rank alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from mpc_dist.runtime import mesh as meshes
from mpc_dist.runtime.executor import Executor
from mpc_dist.runtime.mesh import Edge
from mpc_dist.runtime.transport import NCCL, Channel, DistributedTransport, Manners
from mpc_dist.schedule.action import Action
from tests.nccl.model import HangError
from tests.nccl.test_schedules import Case, record_alone, run_strictly

CASES = [
    Case(partition, windows, M, split, None)
    for partition in [(2, 2, 2), (3, 1, 2)]
    for windows in ("sliding 3", "cumulative 2", "backprop")
    for M in (1, 4)
    for split in (False, True)
]

ALWAYS = {"with_device_waits": False}
"""It hangs in every step; what does not, hangs when some rank waits for its whole device."""


def count_hangs(manners: Manners = NCCL, **how: bool) -> int:
    """Of these cases."""
    hung = 0
    for parts in zip(*record_alone(CASES, manners), strict=True):
        try:
            run_strictly(parts, **how)
        except HangError:
            hung += 1
    return hung


def test_as_it_is_nothing_hangs():
    assert count_hangs() == 0


@contextmanager
def without_upward_words() -> Iterator[None]:
    """Only the direction of activations is connected before the first step."""
    send, receive, upward = dist.send, dist.recv, []

    def make_edge(peer: int, down: dist.ProcessGroup, up: dist.ProcessGroup) -> Edge:
        upward.append(up)
        return Edge(peer, down, up)

    with (
        patch.object(meshes, "Edge", make_edge),
        patch.object(dist, "send", lambda *x, group, **y: None if group in upward else send(*x, group=group, **y)),
        patch.object(dist, "recv", lambda *x, group, **y: None if group in upward else receive(*x, group=group, **y)),
    ):
        yield


def with_edges(make: Callable[[int, dist.ProcessGroup, dist.ProcessGroup], Edge]) -> AbstractContextManager[object]:
    return patch.object(meshes, "Edge", make)


def finish_sends_at_once() -> AbstractContextManager[object]:
    """This thread waits until the neighbour has taken what is sent."""
    send = DistributedTransport.send

    def send_and_wait(self: DistributedTransport, action: Action, tensor: Tensor) -> None:
        send(self, action, tensor)
        for (direction, _), channel in self._channels.items():
            if direction == "send" and channel.sent:
                self._finish_oldest_send(channel)

    return patch.object(DistributedTransport, "send", send_and_wait)


@contextmanager
def read_behind_receives() -> Iterator[None]:
    """What is posted ahead is also waited for ahead, by the device, and a forward reads a value."""
    post, forward = DistributedTransport._post, Executor._forward

    def post_and_wait(self: DistributedTransport, channel: Channel, number: int | None = None) -> None:
        known = len(channel.posted)
        post(self, channel, number)
        for message in list(channel.posted)[known:]:
            message.work.wait()

    def forward_and_read(self: Executor, action: Action) -> None:
        forward(self, action)
        next(iter(self._segments[action.segment].held())).sum().item()

    with (
        patch.object(DistributedTransport, "_post", post_and_wait),
        patch.object(Executor, "_forward", forward_and_read),
    ):
        yield


MUTATIONS: dict[str, tuple[Callable[[], AbstractContextManager[object]], Manners, dict[str, bool]]] = {
    "adjoints are not connected first": (without_upward_words, NCCL, {}),
    "one receive posted ahead": (nullcontext, Manners(1, host_waits=False), {}),
    "two receives posted ahead": (nullcontext, Manners(2, host_waits=False), {}),
    "one group for both directions": (lambda: with_edges(lambda peer, down, _: Edge(peer, down, down)), NCCL, ALWAYS),
    "one group for all neighbours": (
        lambda: with_edges(lambda peer, *_: Edge(peer, dist.group.WORLD, dist.group.WORLD)),
        NCCL,
        ALWAYS,
    ),
    "sends are waited for": (finish_sends_at_once, NCCL, ALWAYS),
    "one hardware queue": (nullcontext, NCCL, {**ALWAYS, "one_queue": True}),
    "a read behind a receive": (read_behind_receives, Manners(1, host_waits=False), ALWAYS),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_a_rule_ranks_hang(name):
    mutate, manners, how = MUTATIONS[name]
    with mutate():
        assert count_hangs(manners, **how) > 0
