"""Blocks that keep only their input and run again on the way back, as if they had run once."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpc_dist.gradient import run_block

SMALL_BUFFER = 1 << 16
"""Numbers in a buffer that is copied for every forward; tables and masks are larger, and stay as they are."""


@dataclass(frozen=True)
class KeptInput:
    """What is left of a block's forward pass: enough to run it again."""

    saved: Any
    """The node of autograd that saves the input: so it counts, and is offloaded, as whatever else is saved."""
    buffers: dict[str, Tensor]
    """What the buffers that the forward may move held before it."""

    @property
    def source(self) -> Tensor:
        """The input, detached."""
        (source,) = self.saved.saved_tensors
        return source  # type: ignore[no-any-return]


class _Keep(torch.autograd.Function):
    """Saves a tensor, which needs an input that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, _: Tensor) -> Tensor:
        """Save the state; the output is nothing."""
        ctx.save_for_backward(state.detach())
        return state.new_empty(0, dtype=torch.float32)


class Recomputer:
    """Runs blocks so; what they draw and what their buffers hold is the same each time.

    A forward may move buffers (batch norm's statistics, spectral norm's vectors). The first run moves them; a later one
    begins with what they held before the first, and works on copies. Which of them move depends on modes and data, and
    batch norm does not even count up their versions: so every small one is taken to move.
    """

    def __init__(self, scope: Callable[[int, int], AbstractContextManager[object]]) -> None:
        """`scope(block, microbatch)` is the context of each forward: it seeds what is drawn."""
        self._scope = scope
        self._still: dict[int, frozenset[str]] = {}
        """By block: the large buffers that no forward has moved so far. They need no copies."""

    def run(self, block: nn.Module, state: Tensor, index: int, microbatch: int) -> tuple[Tensor, KeptInput]:
        """The output of block `index`, with its graph, and what to run it again from.

        With a graph, though nobody goes back through it: without, a block may take other kernels, and autocast would
        remember weights that no gradient reaches.
        """
        buffers = dict(block.named_buffers())
        still = self._still.get(index, frozenset())
        before = {name: buffer.clone() for name, buffer in buffers.items() if name not in still}
        versions = {name: buffers[name]._version for name in still}
        with self._scope(index, microbatch):
            output = run_block(block, state, index)
        now = dict(block.named_buffers())
        if index not in self._still:
            large = (name for name, buffer in buffers.items() if buffer.numel() > SMALL_BUFFER)
            still = self._still[index] = frozenset(name for name in large if torch.equal(before[name], now[name]))
            before = {name: value for name, value in before.items() if name not in still}
        moved = frozenset(name for name, version in versions.items() if now[name]._version != version)
        if moved:  # for the first time: what it held is not known, but it will not be moved twice
            self._still[index] = still - moved
            before |= {name: now[name].clone() for name in moved}
        node = _Keep.apply(state, torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
        return output, KeptInput(node, before)

    def run_again(self, block: nn.Module, source: Tensor, kept: KeptInput, index: int, microbatch: int) -> Tensor:
        """The output once more, with the graph from this source, which is the kept input."""
        with self._scope(index, microbatch):
            copies = {name: buffer.clone() for name, buffer in kept.buffers.items()}
            again: Tensor = torch.func.functional_call(block, copies, (source,)) if copies else block(source)
        return again
