"""Writes down what a rank's host asks of its device, while the real pipeline runs on gloo or among stand-ins.

Every call of torch.distributed ends in a method of a process group: these are replaced by ones that take notes. A host
that reads a value off a device shows in torch's dispatch.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.nccl.model import Call

COLLECTIVES = ("allreduce", "broadcast", "allgather", "all_gather_single", "_allgather_base", "barrier", "reduce")
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal")


@dataclass
class Recording:
    """One rank's calls, in order, and the groups that it is a member of."""

    calls: list[Call] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    on_host: set[str] = field(default_factory=set)
    """Groups that are gloo's whatever the device is."""

    def add(self, call: Call) -> None:
        """Write down a call of the main thread; another thread's groups are its own."""
        if threading.current_thread() is threading.main_thread():
            self.calls.append(call)

    def add_kernel(self) -> None:
        """Write down that something is computed; how much makes no difference."""
        if not self.calls or self.calls[-1].kind != "kernel":
            self.add(Call("kernel"))

    def of(self, group: dist.ProcessGroup) -> str:
        """The group's name."""
        name = str(group.group_name)
        self.members.setdefault(name, tuple(dist.get_process_group_ranks(group)))
        return name


class RecordedWork:
    """A transfer that is waited for as the library's is."""

    def __init__(self, work: Any, number: int, recording: Recording) -> None:
        self._work, self._number, self._recording = work, number, recording

    def wait(self, timeout: Any = None) -> bool:
        """By the host with a timeout, by the compute stream without."""
        self._recording.add(Call("stream wait" if timeout is None else "host wait", self._number))
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Work(TorchDispatchMode):
    """Notes that the device computes, and every value that the host reads off it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in READS:
            self._recording.add(Call("read", what=name))
        elif not name.startswith("c10d::"):
            self._recording.add_kernel()
        return func(*args, **(kwargs or {}))


Answer = Callable[[str, Sequence[Any]], Any]
"""(name of a group's method, its arguments) -> its work, done in the place of other ranks."""


@contextmanager
def recording(answer: Answer | None = None) -> Iterator[Recording]:
    """All that this process asks for within; with an answer, no group is asked."""
    found = Recording()
    methods = {name: dist.ProcessGroup.__dict__[name] for name in ("send", "recv", *COLLECTIVES)}
    new_group = dist.new_group
    numbers = iter(range(10**9))

    def replace(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            number, known = next(numbers), found.of(group)
            kind = {"send": "send", "recv": "receive"}.get(name, "collective")
            peer = found.members[known][arguments[1]] if kind != "collective" else -1
            found.add(Call(kind, number, known, peer, what=name, is_on_host=known in found.on_host))  # type: ignore[arg-type]
            if answer is None:
                work = method(group, *arguments, **options)
            else:
                with _disable_current_modes():  # what others do is not noted here
                    work = answer(name, arguments)
            return RecordedWork(work, number, found)

        return call

    def make_group(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*arguments, backend=backend if answer is None else None, **options)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            found.on_host.add(found.of(group))
        return group

    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, replace(name, method))
    dist.new_group = make_group
    try:
        with _Work(found):
            yield found
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)
        dist.new_group = new_group


def join(recordings: Sequence[Recording]) -> tuple[list[list[Call]], dict[str, tuple[int, ...]]]:
    """What the model takes: the calls of all ranks, and the members of all groups."""
    members = {name: ranks for one in recordings for name, ranks in one.members.items()}
    return [one.calls for one in recordings], members
