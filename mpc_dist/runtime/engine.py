"""Calls torch's autograd engine without the checks of `torch.autograd.backward` and `grad`.

They cost twice what the engine takes for a small graph, on every action, and check what holds here by construction:
one adjoint per output, of the output's shape.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

Place = Tensor | GradientEdge


def add_gradients(
    outputs: Sequence[Place], adjoints: Sequence[Tensor], sources: Sequence[Tensor], *, retain_graph: bool
) -> None:
    """Add the gradients at the sources to their `.grad`; there must be at least one source."""
    _engine_run_backward(
        tuple(outputs),
        tuple(adjoints),
        retain_graph,
        False,  # create_graph
        tuple(sources),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def find_gradients(
    output: Tensor, adjoint: Tensor, sources: Sequence[Place], *, retain_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradients at the sources, without touching any `.grad`; None where the output does not depend on one."""
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (output,), (adjoint,), retain_graph, False, tuple(sources), allow_unreachable=True, accumulate_grad=False
    )
    return found
