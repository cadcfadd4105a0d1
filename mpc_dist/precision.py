"""In what type a network computes, holds its weights and sends its states: one value for the run, its oracle and plans.

A type of two bytes is computed in by torch's autocast on weights of float32, or is the weights' own. Gradients are
summed in float32 either way.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_NOTHING = nullcontext()
_CAST_BYTES = 2
"""Of a number in either of the types that autocast casts to."""


@dataclass(frozen=True)
class Precision:
    """The types of one run."""

    compute: torch.dtype | None = None
    """What forwards compute in where torch deems it safe; None: in the type of weights and states."""
    weights: torch.dtype = torch.float32
    """Of weights, states and inputs."""

    def scope(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of one block's or readout's forward."""
        return _NOTHING if self.compute is None else torch.autocast(device.type, dtype=self.compute)

    def step_scope(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a whole step: within it each weight is cast once, for all blocks and micro-batches.

        It must end after the update: the next step casts anew. Frozen weights torch casts every time.
        """
        if self.compute is not None:
            return _keep_casts(device)
        return _forget_casts() if torch.is_autocast_enabled(device.type) else _NOTHING

    def message_type(self, state: torch.dtype) -> torch.dtype:
        """The type in which states of this type, and their adjoints, travel between ranks."""
        return self.compute if self.compute is not None and state == torch.float32 else state

    def round(self, state: Tensor) -> Tensor:
        """What a rank receives of a state that another sends; its adjoint is rounded likewise on its way back."""
        return state.to(self.message_type(state.dtype)).to(state.dtype)


FULL = Precision()
"""Everything in the type of the weights."""


def set_tf32(device: torch.device, *, is_allowed: bool) -> None:
    """Let a GPU multiply float32 matrices in TF32, or not; other devices have no such thing."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if is_allowed else "highest")


@contextmanager
def _keep_casts(device: torch.device) -> Iterator[None]:
    with _forget_casts(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _forget_casts() -> Iterator[None]:
    # torch does so at the end of the outermost autocast, which may be the caller's own, around many steps: their
    # updates would not be seen.
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients of weights of two bytes be float32: those of micro-batches are summed without rounding."""
    for parameter in parameters:
        if parameter.itemsize == 2 and parameter.grad is None:
            parameter.grad_dtype = torch.float32


@contextmanager
def gradients_as_weights(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context in which gradients have the types of their weights, as optimizers want; afterwards these are gone."""
    changed = [p for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
    for parameter in changed:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = gradient.to(parameter.dtype)
    yield
    for parameter in changed:
        parameter.grad = None
    sum_in_float32(changed)


def gradient_type(parameter: Tensor) -> torch.dtype:
    """In which its gradient is summed."""
    return parameter.grad_dtype or parameter.dtype


def gradient_bytes(parameter: Tensor) -> int:
    """What the gradient of a parameter takes."""
    return parameter.numel() * gradient_type(parameter).itemsize


def cast_bytes(output: Tensor) -> int:
    """What autocast's copies of weights take of which this output was made: they are held until the step ends."""
    seen: set[Node | None] = {None}
    waiting, found = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        assert node is not None
        seen.add(node)
        weight = _find_cast(node)
        found |= set() if weight is None else {weight}
        waiting += [below for below, _ in node.next_functions]
    return sum(weight.numel() * _CAST_BYTES for weight in found)


def is_cast(tensor: Tensor) -> bool:
    """Whether a tensor is autocast's copy of a trained weight, or a view of one."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    return node is not None and _find_cast(node) is not None


def _find_cast(node: Node) -> nn.Parameter | None:
    """The weight that this operation copies to a type of two bytes, if it does."""
    if node.name() != "ToCopyBackward0" or node._input_metadata[0].dtype.itemsize != _CAST_BYTES:
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)  # that of an AccumulateGrad
    return leaf if isinstance(leaf, nn.Parameter) else None
