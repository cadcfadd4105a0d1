"""The sequential reference of the pipeline: `mpc_gradients` on each micro-batch, then the optimizer."""

import copy
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import Chain
from mpc_dist.precision import FULL, Precision
from mpc_dist.windows import Windows


def reference_gradients(
    chain: Chain,
    inputs: Tensor,
    labels: Tensor,
    windows: Windows,
    M: int,
    *,
    precision: Precision = FULL,
    sent_at: Collection[int] = (),
    scale: float = 1.0,
) -> dict[str, Tensor]:
    """The mean over micro-batches of the definition's gradients, of the scaled loss in types that would lose them."""
    scaled = copy.copy(chain)
    factor = scale / M if precision.compute or precision.weights.itemsize == 2 else 1.0
    scaled.loss = lambda prediction, target: chain.loss(prediction, target) * factor
    total: dict[str, Tensor] = {}
    for x, y in zip(inputs.chunk(M), labels.chunk(M), strict=True):
        for name, gradient in mpc_gradients(scaled, x, y, windows, precision=precision, sent_at=sent_at).items():
            part = gradient.float() if gradient.itemsize == 2 else gradient
            total[name] = total.get(name, torch.zeros_like(part)) + part / (factor * M)
    return total


def train_reference(
    chain: Chain,
    batches: Sequence[tuple[Tensor, Tensor]],
    windows: Windows,
    M: int,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """Optimizer steps with the reference's gradients, one after another."""
    read = {f"readouts.{s}" for s in windows.readouts}
    named = {
        name: parameter
        for name, parameter in chain.named_parameters()
        if name.startswith("blocks.") or ".".join(name.split(".")[:2]) in read
    }
    update = optimizer(list(named.values()))
    for inputs, labels in batches:
        for name, gradient in reference_gradients(chain, inputs, labels, windows, M).items():
            named[name].grad = gradient
        update.step()


class KeepGradients(torch.optim.Optimizer):
    """Changes nothing, so that the gradients of a step can be read."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Leave the weights."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave the gradients."""
