"""Compute emulated by sleeping: with more ranks than cores, overlap and bubbles are then real.

A block's forward sleeps f, its input gradient f, its weight gradient f. The weight's branch leaves the graph below the
input's sleep, as in a real layer stack: a weight gradient alone costs both, a relay only the first.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def measure_overshoot() -> float:
    """How much longer than asked for this machine sleeps, in seconds."""
    asked, taken = 0.01, []
    for _ in range(20):
        start = time.perf_counter()
        time.sleep(asked)
        taken.append(time.perf_counter() - start - asked)
    return statistics.median(taken)


@dataclass
class Pace:
    """How long a block takes."""

    seconds: float
    """Forward, input gradient and weight gradient each."""
    overshoot: float = 0.0
    """What to sleep less, see `measure_overshoot`."""

    def __post_init__(self) -> None:
        self._backward = -1
        self._deadline = 0.0

    def spend(self, since: float) -> None:
        """Sleep until the block's time is over, counted from `since`."""
        self._deadline = since + self.seconds
        remaining = self._deadline - time.perf_counter() - self.overshoot
        if remaining > 0:
            time.sleep(remaining)

    def spend_in_backward(self) -> None:
        """Sleep for a gradient; two of one backward pass take twice the time from the first one's beginning."""
        current = torch._C._current_graph_task_id()
        self.spend(self._deadline if current == self._backward else time.perf_counter())
        self._backward = current


class _SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, pace: Pace, since: float) -> Tensor:
        ctx.pace = pace
        out = state.clone()
        pace.spend(since)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.pace.spend_in_backward()
        return gradients[0], None, None


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.pace.spend_in_backward()
        return gradients[0], None


class SleepingBlock(nn.Module):
    """Adds its weight to the state, and takes its time over it."""

    def __init__(self, pace: Pace, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.pace = pace

    def forward(self, state: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        start = time.perf_counter()
        branch = _SleepWeight.apply(self.weight, self.pace)  # type: ignore[no-untyped-call]
        out: Tensor = _SleepInput.apply(state + branch, self.pace, start)  # type: ignore[no-untyped-call]
        return out


def cheap_loss(prediction: Tensor, _: Tensor) -> Tensor:
    """A loss that costs next to nothing."""
    return (prediction * prediction).sum()
