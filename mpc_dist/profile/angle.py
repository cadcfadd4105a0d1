"""The angle between the MPC gradient and back-propagation's, for any windows, from one forward pass per batch.

Over the blocks' parameters (readouts learn from their own loss whatever the horizon), with g_T of back-propagation:

    cos(theta) = <g, g_T> / (|g| |g_T|)          averaged over batches, as in Algorithm 1 of the paper

Every gradient of every window map is a weighted sum of the same (readout, block) gradients dL(x(s))/du(t). Each of
those is computed once, and only their inner products are kept: from them follows the angle of any windows.
"""

from collections.abc import Callable, Iterable
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
    """Inner products of the (readout, block) gradients of a chain with a readout at every boundary."""

    grams: tuple[tuple[Gram, ...], ...]
    """`grams[batch][t][i, j]` = <dL(x(t+1+i))/du(t), dL(x(t+1+j))/du(t)>."""

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
        return np.array(
            [
                _inner(grams, windows, full)
                / np.sqrt(_inner(grams, windows, windows))
                / np.sqrt(_inner(grams, full, full))
                for grams in self.grams
            ]
        )

    def horizon_cosines(self) -> NDArray[np.float64]:
        """cos(theta_h) of the paper's sliding windows for h = 1..T."""
        return np.array([self.cosine(sliding(self.num_blocks, h)) for h in range(1, self.num_blocks + 1)])


def measure_angles(
    model: Chain, batches: Iterable[tuple[Tensor, Tensor]], *, advance: Callable[[], None] = lambda: None
) -> AngleProfile:
    """Profile the gradients of a chain with a readout at every boundary; the chain is left as it was.

    `advance` is called after each block of each batch, for a progress bar.
    """
    missing = sorted(set(range(1, model.num_blocks + 1)) - set(model.boundaries))
    if missing:
        raise ValueError(f"angles of all horizons need a readout at every boundary; {missing} have none")
    with unchanged(model):
        grams = tuple(_profile_batch(model, inputs, labels, advance) for inputs, labels in batches)
    if not grams:
        raise ValueError("angles need at least 1 batch, got none")
    return AngleProfile(grams)


def _profile_batch(model: Chain, inputs: Tensor, labels: Tensor, advance: Callable[[], None]) -> tuple[Gram, ...]:
    held: list[HeldBlock] = []
    first_adjoints: list[Tensor] = []  # dL(x(s))/dx(s), for s = 1..T
    state = inputs
    for boundary, block in enumerate(model.blocks, start=1):
        held.append(HeldBlock.run(block, state))
        state = held[-1].output.detach().requires_grad_()
        loss = model.loss_at(boundary, state, labels)
        first_adjoints.append(*torch.autograd.grad(loss, state))

    grams: list[Gram] = []
    adjoints: list[Tensor] = []  # dL(x(s))/dx(t+1), for s = t+1..T
    for t in reversed(range(model.num_blocks)):
        adjoints.insert(0, first_adjoints[t])
        passed = held.pop()
        rows, below = [], []
        for adjoint in adjoints:
            gradients, further = passed.pull_back(adjoint, weights=True, to_input=t > 0)
            rows.append(_flatten(gradients.values()))
            if further is not None:
                below.append(further)
        stacked = torch.stack(rows).double()
        grams.append((stacked @ stacked.T).cpu().numpy())
        adjoints = below
        advance()
    return tuple(reversed(grams))


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
