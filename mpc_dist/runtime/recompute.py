"""Blocks that keep only their input and run again in backward, as if they had run once."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpc_dist.gradient import run_block

SMALL_BUFFER = 1 << 16
"""Numbers in a buffer that is copied for every forward; tables and masks are larger, and stay as they are."""


class Recomputer:
    """Runs blocks so; what they draw and what their buffers hold is the same each time.

    A forward may move buffers (batch norm's statistics, spectral norm's vectors). The first run moves them; a later one
    begins with what they held before the first, and works on copies. Which of them move depends on modes and data, and
    batch norm does not even count up their versions: so every small one is taken to move.
    """

    def __init__(self, scope: Callable[[int, int], AbstractContextManager[object]]) -> None:
        """`scope(block, microbatch)` is the context of each forward."""
        self._scope = scope
        self._still: dict[int, frozenset[str]] = {}
        """By block: the large buffers that no forward has moved so far. They need no copies."""

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
        """The output, and what the buffers that may move held before."""
        buffers = dict(block.named_buffers())
        still = self._still.get(index, frozenset())
        before = {name: buffer.clone() for name, buffer in buffers.items() if name not in still}
        versions = {name: buffers[name]._version for name in still}
        output = run_block(block, state, index)
        now = dict(block.named_buffers())
        if index not in self._still:
            large = (name for name, buffer in buffers.items() if buffer.numel() > SMALL_BUFFER)
            still = self._still[index] = frozenset(name for name in large if torch.equal(before[name], now[name]))
            return output, {name: value for name, value in before.items() if name not in still}
        moved = frozenset(name for name, version in versions.items() if now[name]._version != version)
        if moved:  # for the first time: what it held is not known, but it will not be moved twice
            self._still[index] = still - moved
            before |= {name: now[name].clone() for name in moved}
        return output, before
