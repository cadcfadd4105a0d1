"""The angle between the MPC gradient and back-propagation's, for any windows, from one forward pass per batch.

Over the blocks' parameters (readouts learn from their own loss whatever the horizon), with g_T of back-propagation:

    cos(theta) = <g, g_T> / (|g| |g_T|)          averaged over batches, as in Algorithm 1 of the paper

Every gradient of every window map is a weighted sum of the same (readout, block) gradients dL(x(s))/du(t). Each of
those is computed once, and only their inner products are kept: from them follows the angle of any windows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.gradient import HeldBlock
from mpc_dist.models.chain import Chain
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

    def horizon_cosines(self) -> NDArray[np.float64]:
        """cos(theta_h) of the paper's sliding windows for h = 1..T."""
        return np.array([self.cosine(sliding(self.num_blocks, h)) for h in range(1, self.num_blocks + 1)])


def measure_angles(
    model: Chain,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    windows: Sequence[Windows] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> AngleProfile:
    """Profile the gradients that these window maps need (default: all there are); the chain is left as it was.

    `advance` is called after each block of each batch, for a progress bar.
    """
    needed = _needed_readouts(model.num_blocks, windows)
    missing = sorted({readout for readouts in needed for readout in readouts} - set(model.boundaries))
    if missing:
        raise ValueError(f"these angles need readouts at boundaries {missing}, which the model lacks; build it so")
    with unchanged(model):
        grams = tuple(_profile_batch(model, inputs, labels, needed, advance) for inputs, labels in batches)
    if not grams:
        raise ValueError("angles need at least 1 batch, got none")
    return AngleProfile(grams)


def _needed_readouts(num_blocks: int, windows: Sequence[Windows] | None) -> list[tuple[int, ...]]:
    """For each block, the readouts whose gradients are needed, ascending; back-propagation's always is."""
    if windows is None:
        return [tuple(range(t + 1, num_blocks + 1)) for t in range(num_blocks)]
    maps = [*windows, backprop(num_blocks)]
    return [tuple(sorted({s for one in maps for s, _ in one.targets[t]})) for t in range(num_blocks)]


def _profile_batch(
    model: Chain, inputs: Tensor, labels: Tensor, needed: Sequence[Sequence[int]], advance: Callable[[], None]
) -> tuple[Gram, ...]:
    lowest = {readout: t for t in reversed(range(model.num_blocks)) for readout in needed[t]}
    held: list[HeldBlock] = []
    first_adjoints: dict[int, Tensor] = {}  # dL(x(s))/dx(s)
    state = inputs
    for boundary, block in enumerate(model.blocks, start=1):
        held.append(HeldBlock.run(block, state))
        state = held[-1].output.detach().requires_grad_()
        if boundary in lowest:
            loss = model.loss_at(boundary, state, labels)
            (first_adjoints[boundary],) = torch.autograd.grad(loss, state)

    grams: list[Gram] = []
    adjoints: dict[int, Tensor] = {}  # dL(x(s))/dx(t+1), by s
    for t in reversed(range(model.num_blocks)):
        if t + 1 in first_adjoints:
            adjoints[t + 1] = first_adjoints.pop(t + 1)
        passed, below, rows = held.pop(), {}, {}
        for readout, adjoint in adjoints.items():
            gradients, further = passed.pull_back(adjoint, weights=readout in needed[t], to_input=t > lowest[readout])
            if readout in needed[t]:
                rows[readout] = _flatten(gradients.values())
            if further is not None:
                below[readout] = further
        grams.append(_gram(rows, t, model.num_blocks))
        adjoints = below
        advance()
    return tuple(reversed(grams))


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
