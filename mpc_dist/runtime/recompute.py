"""Blocks that keep only their input and run again in backward, as if they had run once."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpc_dist.gradient import run_block


class Recomputer:
    """Runs blocks so; what they draw and what their buffers hold is the same each time.

    A forward may move buffers (batch norm's statistics, spectral norm's vectors). The first run moves them; a later one
    begins with what they held before the first, and works on copies.
    """

    def __init__(self, scope: Callable[[int, int], AbstractContextManager[object]]) -> None:
        """`scope(block, microbatch)` is the context of each forward."""
        self._scope = scope
        self._moving: dict[int, frozenset[str]] = {}

    def run(self, block: nn.Module, state: Tensor, index: int, microbatch: int) -> Tensor:
        """The output of block `index`."""
        kept: dict[str, Tensor] | None = None

        def forward(source: Tensor) -> Tensor:
            nonlocal kept
            with self._scope(index, microbatch):
                if kept is None:
                    output, kept = self._run_first(block, source, index)
                    return output
                copies = {name: buffer.clone() for name, buffer in kept.items()}
                again: Tensor = torch.func.functional_call(block, copies, (source,)) if copies else block(source)
                return again

        # The scope seeds what is drawn, each time. To its end: some operations save what they have yet to fill.
        output: Tensor = checkpoint(forward, state, use_reentrant=False, preserve_rng_state=False, early_stop=False)
        return output

    def _run_first(self, block: nn.Module, state: Tensor, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and what the buffers that move held before."""
        is_first = index not in self._moving
        buffers = dict(block.named_buffers())
        before = {name: buffers[name].clone() for name in (buffers if is_first else self._moving[index])}
        output = run_block(block, state, index)
        if is_first:
            # By value: batch norm moves its statistics without counting up their version. What does not move needs no
            # copies later: it may be large.
            now = dict(block.named_buffers())
            self._moving[index] = frozenset(name for name in buffers if not torch.equal(before[name], now[name]))
        return output, {name: before[name] for name in self._moving[index]}
