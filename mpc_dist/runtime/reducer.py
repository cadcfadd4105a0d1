"""Averages gradients over a stage's replicas while other work goes on.

Every replica sends the same buckets in the same order, whatever its part of the batch reached. A parameter without a
gradient here counts as zero; one that has a gradient on no replica keeps none, as in one process with the whole batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mpc_dist.precision import gradient_bytes, gradient_type
from mpc_dist.runtime.clock import Clock, Moment
from mpc_dist.runtime.watch import Watch

FIRST_BUCKET_BYTES = 1 << 20
"""Of the first bucket, which should leave soon; as torch's DDP."""
BUCKET_BYTES = 25 << 20
"""Of every other, unless one gradient alone is larger; as torch's DDP."""


@dataclass(frozen=True)
class Reduction:
    """A bucket's way to the other replicas and back."""

    start: float
    """Seconds, by the clock of a step's timeline."""
    end: float
    """When it was waited for and there."""
    size: int
    """Bytes."""


Travel = tuple[Moment, Moment, int]
"""The same, before anybody has read a clock."""


class _Bucket:
    """Gradients that travel together, followed by one number for each: whether this replica has it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.buffer = torch.zeros(sum(sizes) + len(sizes), dtype=gradient_type(first), device=first.device)
        *parts, self.flags = torch.split(self.buffer, [*sizes, len(sizes)])
        self.parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.num_coming = 0
        """Gradients that are not complete yet."""

    def fill(self) -> None:
        """Copy this replica's gradients."""
        self.flags.fill_(1)
        for index, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if parameter.grad is None:
                part.zero_()
                self.flags[index] = 0
            else:
                part.copy_(parameter.grad)

    def empty(self) -> None:
        """Put the averages in place."""
        # Only where this replica has no gradient is it unknown whether another has: reading it waits for the device.
        is_whole = all(parameter.grad is not None for parameter in self.parameters)
        present = [1.0] * len(self.parameters) if is_whole else self.flags.tolist()
        for parameter, part, flag in zip(self.parameters, self.parts, present, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif flag:
                parameter.grad = part.clone()


class AllReduceReducer:
    """Asynchronous all-reduces of buckets, each started when its gradients and those of all before it are complete."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch, clock: Clock | None = None) -> None:
        """With a clock, it tells when buckets travelled."""
        self._group = group
        self._watch = watch
        self._clock = clock
        self._num_replicas = dist.get_world_size(group)
        self._layouts: dict[tuple[int, ...], list[_Bucket]] = {}
        self._waiting: list[_Bucket] | None = None
        """What was announced and has not been started, in order; None: nothing was announced."""
        self._bucket_of: dict[int, _Bucket] = {}
        self._hooks: list[RemovableHandle] = []
        self._under_way: list[tuple[_Bucket, dist.Work, Moment]] = []

    def expect(self, parameters: Sequence[nn.Parameter], coming: Sequence[nn.Parameter]) -> None:
        """The next backward makes the last gradients of those `coming`, one each; the others' are complete."""
        assert self._waiting is None
        self._waiting = list(self._lay_out(parameters))
        bucket_of = {id(p): bucket for bucket in self._waiting for p in bucket.parameters}
        self._bucket_of = {id(p): bucket_of[id(p)] for p in coming}
        for bucket in self._bucket_of.values():
            bucket.num_coming += 1
        hooks = [p.register_post_accumulate_grad_hook(self._note) for p in coming]  # type: ignore[no-untyped-call]
        self._hooks = hooks
        self._start_complete()

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the gradients of these parameters travel, which are all complete, as far as they do not yet."""
        for hook in self._hooks:
            hook.remove()
        if self._waiting is None:
            self._waiting = list(self._lay_out(parameters))
        for bucket in self._waiting:
            bucket.num_coming = 0  # what has not come has no gradient here, or one from before
        self._start_complete()
        self._waiting, self._hooks, self._bucket_of = None, [], {}

    def finish(self) -> list[Travel]:
        """Wait for all of them and put the averages in place; when each bucket travelled."""
        done: list[Travel] = []
        for bucket, work, start in self._under_way:
            with self._watch.waiting(self._group, "the average of the replicas' gradients"):
                work.wait()
            if self._clock is not None:
                done.append((start, self._clock.now(), bucket.buffer.nbytes))
            bucket.buffer /= self._num_replicas
            bucket.empty()
        self._under_way.clear()
        return done

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """The buckets of these parameters: the same at every step and on every replica."""
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = [_Bucket(part) for part in fill_buckets(parameters)]
        return self._layouts[key]

    def _note(self, parameter: Tensor) -> None:
        bucket = self._bucket_of.pop(id(parameter), None)
        if bucket is None:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} came in two parts, the second after "
                "it may have been sent to the other replicas; a block must not run a backward of its own"
            )
        bucket.num_coming -= 1
        self._start_complete()

    def _start_complete(self) -> None:
        """Start what is complete, but none before the one ahead of it: replicas must start them in the same order."""
        while self._waiting and not self._waiting[0].num_coming:
            bucket = self._waiting.pop(0)
            bucket.fill()
            start = None if self._clock is None else self._clock.now()
            work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((bucket, work, start))


def fill_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters from last to first, as backward reaches them, in buckets of one type of gradients each."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        bucket, room = open_buckets.get(gradient_type(parameter), ([], 0))
        size = gradient_bytes(parameter)
        if room < size:
            bucket, room = [], BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[gradient_type(parameter)] = bucket, room - size
    return buckets


def bucket_bytes(parameters: Iterable[Tensor]) -> int:
    """What the buckets of these parameters take."""
    return sum(gradient_bytes(parameter) + gradient_type(parameter).itemsize for parameter in parameters)
