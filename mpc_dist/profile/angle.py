"""The angle between the MPC gradient and back-propagation's, for any windows, from one forward pass per batch.

Over the blocks' parameters (readouts learn from their own loss whatever the horizon), with g_T of back-propagation:

    cos(theta) = <g, g_T> / (|g| |g_T|)          averaged over batches, as in Algorithm 1 of the paper

Every gradient of every window map is a weighted sum of the same (readout, block) gradients dL(x(s))/du(t). Each of
those is computed once, and only their inner products are kept: from them follows the angle of any windows.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mpc_dist.document import read_json, write_whole
from mpc_dist.gradient import HeldBlock
from mpc_dist.models.chain import Chain
from mpc_dist.precision import FULL, Precision
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.windows import Windows, backprop, sliding

Gram = NDArray[np.float64]


@dataclass(frozen=True)
class AngleProfile:
    """Inner products of the (readout, block) gradients of a chain."""

    grams: tuple[tuple[Gram, ...], ...]
    """`grams[batch][t][i, j]` = <dL(x(t+1+i))/du(t), dL(x(t+1+j))/du(t)>; NaN where it was not asked for."""

    @property
    def num_blocks(self) -> int:
        """How many blocks the chain has (T)."""
        return len(self.grams[0])

    def cosine(self, windows: Windows) -> float:
        """cos(theta) of these windows' gradient, averaged over the batches."""
        return float(np.mean(self.batch_cosines(windows)))

    def batch_cosines(self, windows: Windows) -> NDArray[np.float64]:
        """cos(theta) of these windows' gradient, for each batch."""
        if windows.num_blocks != self.num_blocks:
            raise ValueError(f"the windows cover {windows.num_blocks} blocks but the profile {self.num_blocks}")
        full = backprop(self.num_blocks)
        cosines = []
        for number, grams in enumerate(self.grams):
            ours, exact = (_inner(grams, one, one) for one in (windows, full))
            if not (ours > 0 and exact > 0):
                gradient = "of these windows" if exact > 0 else "of back-propagation"
                raise ValueError(
                    f"the gradient {gradient} on batch {number} is zero or was not measured, so it has no angle; "
                    "check that blocks are trainable, readouts not all zero, and the windows among those profiled"
                )
            cosines.append(_inner(grams, windows, full) / np.sqrt(ours * exact))
        return np.array(cosines)

    def write(self, path: Path) -> None:
        """As JSON, to be read again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # NaN, for what was not measured, is null in JSON.
        grams = [[[[None if np.isnan(v) else v for v in row] for row in g] for g in batch] for batch in self.grams]
        write_whole(path, json.dumps({"grams": grams}) + "\n")

    @classmethod
    def read(cls, path: Path) -> "AngleProfile":
        """Read what `write` wrote."""
        try:
            content = read_json(path)["grams"]
            grams = tuple(tuple(np.array(gram, dtype=np.float64) for gram in batch) for batch in content)
            if not grams or not grams[0] or {len(batch) for batch in grams} != {len(grams[0])}:
                raise ValueError("it holds no batch, or batches of different lengths")
            for batch in grams:
                for t, gram in enumerate(batch):
                    if gram.shape != (len(batch) - t,) * 2:
                        raise ValueError(f"block {t} has inner products of shape {gram.shape}")
        except OSError as error:
            raise ValueError(f"cannot read the angle profile {path}: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is no angle profile of mpc_dist ({error}); delete it") from error
        return cls(grams)

    def horizon_cosines(self) -> NDArray[np.float64]:
        """cos(theta_h) of the paper's sliding windows for h = 1..T."""
        return np.array([self.cosine(sliding(self.num_blocks, h)) for h in range(1, self.num_blocks + 1)])


def measure_angles(
    model: Chain,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    windows: Sequence[Windows] | None = None,
    precision: Precision = FULL,
    advance: Callable[[], None] = lambda: None,
) -> AngleProfile:
    """Profile the gradients that these window maps need (default: all there are); the chain is left as it was.

    `advance` is called after each block of each batch, for a progress bar.
    """
    needed = needed_readouts(model.num_blocks, windows)
    missing = sorted({readout for readouts in needed for readout in readouts} - set(model.boundaries))
    if missing:
        raise ValueError(f"these angles need readouts at boundaries {missing}, which the model lacks; build it so")
    grams = []

    def loss_at(boundary: int, state: Tensor, labels: Tensor) -> Tensor:
        return model.loss_at(boundary, state, labels, precision)

    with unchanged(model):
        for inputs, labels in batches:
            enter = partial(_enter, precision, inputs.device)
            probe = StageProbe(list(model.blocks), 0, loss_at, needed, enter)
            probe.forward(inputs, labels)
            probe.backward({}, advance)
            grams.append(probe.grams())
    if not grams:
        raise ValueError("angles need at least 1 batch, got none")
    return AngleProfile(tuple(grams))


def _enter(precision: Precision, device: torch.device, _block: int) -> AbstractContextManager[object]:
    return precision.scope(device)


def needed_readouts(num_blocks: int, windows: Sequence[Windows] | None) -> list[tuple[int, ...]]:
    """For each block, the readouts whose gradients are needed, ascending; back-propagation's always is."""
    if windows is None:
        return [tuple(range(t + 1, num_blocks + 1)) for t in range(num_blocks)]
    maps = [*windows, backprop(num_blocks)]
    return [tuple(sorted({s for one in maps for s, _ in one.targets[t]})) for t in range(num_blocks)]


class StageProbe:
    """Consecutive blocks of a chain, one forward and one backward pass per micro-batch; or the whole chain.

    Gradients are summed over the micro-batches, and their inner products are those of the sums.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        first_block: int,
        loss_at: Callable[[int, Tensor, Tensor], Tensor],
        needed: Sequence[Sequence[int]],
        scope: Callable[[int], AbstractContextManager[object]] = lambda _block: nullcontext(),
    ) -> None:
        """`needed[t]`: the readouts whose gradients are wanted of block t, for every block of the chain.

        `scope(t)` is the context of block t's forward.
        """
        self._scope = scope
        self._blocks = blocks
        self._first = first_block
        self._loss_at = loss_at
        self._needed = needed
        # The lowest block that each readout's adjoint has to reach.
        self.lowest = {readout: t for t in reversed(range(len(needed))) for readout in needed[t]}
        self._rows: list[dict[int, Tensor]] = [{} for _ in blocks]
        self._held: list[HeldBlock] = []
        self._first_adjoints: dict[int, Tensor] = {}  # dL(x(s))/dx(s)

    def forward(self, state: Tensor, labels: Tensor | None, *, share: float = 1.0) -> Tensor:
        """Run the blocks and read every loss that is needed; `share` weighs this micro-batch, 0: it has no label."""
        for boundary, block in enumerate(self._blocks, start=self._first + 1):
            with self._scope(boundary - 1):
                self._held.append(HeldBlock.run(block, state, boundary - 1))
            state = self._held[-1].output.detach().requires_grad_()
            if boundary in self.lowest and share:
                assert labels is not None
                (adjoint,) = torch.autograd.grad(self._loss_at(boundary, state, labels), state)
                self._first_adjoints[boundary] = adjoint if share == 1 else adjoint * share
            elif boundary in self.lowest:
                self._first_adjoints[boundary] = torch.zeros_like(state)
        return state.detach()

    def backward(self, adjoints: dict[int, Tensor], advance: Callable[[], None] = lambda: None) -> dict[int, Tensor]:
        """Pull back the adjoints at the output, by readout, and these blocks' own; those that go on below."""
        for t in reversed(range(self._first, self._first + len(self._blocks))):
            if t + 1 in self._first_adjoints:
                adjoints = {**adjoints, t + 1: self._first_adjoints.pop(t + 1)}
            passed, rows, below = self._held.pop(), self._rows[t - self._first], {}
            for readout, adjoint in adjoints.items():
                is_needed = readout in self._needed[t]
                gradients, further = passed.pull_back(adjoint, weights=is_needed, to_input=t > self.lowest[readout])
                if is_needed:
                    row = _flatten(gradients.values())
                    rows[readout] = rows[readout] + row if readout in rows else row
                if further is not None:
                    below[readout] = further
            adjoints = below
            advance()
        return adjoints

    def grams(self) -> tuple[Gram, ...]:
        """Inner products of each of these blocks' gradients."""
        num_blocks = len(self._needed)
        return tuple(_gram(rows, t, num_blocks) for t, rows in enumerate(self._rows, start=self._first))


def _gram(rows: dict[int, Tensor], t: int, num_blocks: int) -> Gram:
    """Inner products of block t's gradients; in float64, because float32 sums would lose small angles."""
    gram = np.full((num_blocks - t, num_blocks - t), np.nan)
    places = [readout - t - 1 for readout in rows]
    stacked = torch.stack(list(rows.values())).double()
    gram[np.ix_(places, places)] = (stacked @ stacked.T).cpu().numpy()
    return gram


def _flatten(gradients: Iterable[Tensor]) -> Tensor:
    parts = [gradient.reshape(-1) for gradient in gradients]
    return torch.cat(parts) if parts else torch.zeros(0)


def _inner(grams: tuple[Gram, ...], left: Windows, right: Windows) -> float:
    """<g_left, g_right> over all blocks, each gradient being the weighted sum of its targets'."""
    return float(
        sum(
            weight * other_weight * gram[boundary - t - 1, other - t - 1]
            for t, gram in enumerate(grams)
            for boundary, weight in left.targets[t]
            for other, other_weight in right.targets[t]
        )
    )
