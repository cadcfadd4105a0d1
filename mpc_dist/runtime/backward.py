"""The ways back through a graph: a relay, a whole backward, or its two halves, first the input's, later the weights'.

The halves walk no path twice: where the graph that leads to the input meets a branch that leads only to weights, the
gradient that arrives there is kept, and the weight half begins from those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpc_dist.precision import gradient_type
from mpc_dist.runtime.branches import BranchFinder
from mpc_dist.runtime.engine import add_gradients, find_gradients


class Beginnings(NamedTuple):
    """Where branches of a graph begin that can be run in one call of the engine."""

    edges: Sequence[GradientEdge]
    arrived: Sequence[Tensor | None]
    """The gradient at each edge; None where none arrived."""
    parameters: Sequence[Tensor]
    """At the ends of the branches."""


@dataclass(slots=True)
class Graph:
    """What a forward pass of some blocks left, from a detached input to an output."""

    source: Tensor
    output: Tensor
    parameters: Sequence[Tensor]
    """Of the blocks, those that are trained."""
    finder: BranchFinder

    def relay(self, adjoint: Tensor, *, is_last: bool) -> Tensor:
        """The adjoint at the input; weights are not touched. After the last way back, nothing is kept."""
        (below,) = find_gradients(self.output, adjoint, [self.source], retain_graph=not is_last)
        return torch.zeros_like(self.source) if below is None else below

    def run_backward(self, adjoint: Tensor, *, to_input: bool, is_last: bool) -> Tensor | None:
        """Add the weight gradients to `.grad`; the adjoint at the input if asked for."""
        sources = [*self.parameters, *([self.source] if to_input else [])]
        if self.output.requires_grad and sources:
            add_gradients([self.output], [adjoint], sources, retain_graph=not is_last)
        below, self.source.grad = self.source.grad, None
        return torch.zeros_like(self.source) if to_input and below is None else below

    def run_input_half(self, adjoint: Tensor) -> tuple[Tensor, Sequence[Beginnings]]:
        """The adjoint at the input, and, in rounds that come one after another, what is left to do for the weights.

        A parameter that is used in several places, or that the input's path never meets, gets its gradient at once.
        """
        edges, rounds, direct = self.finder.find(self.output, self.source)
        below, *found = find_gradients(self.output, adjoint, [self.source, *edges, *direct], retain_graph=True)
        for parameter, gradient in zip(direct, found[len(edges) :], strict=True):
            if gradient is not None:
                add: Any = get_gradient_edge(parameter).node
                add(gradient.to(gradient_type(parameter)))  # as the engine would
        left = [Beginnings(edges[places], found[places], parameters) for places, parameters in rounds]
        return torch.zeros_like(self.source) if below is None else below, left


def run_weight_halves(graphs: Sequence[Sequence[Beginnings]]) -> None:
    """Add the weight gradients of graphs that were run back to their inputs: a call of the engine for each round."""
    for together in zip_longest(*graphs, fillvalue=Beginnings((), (), ())):
        begun = [
            (edge, gradient)
            for one in together
            for edge, gradient in zip(one.edges, one.arrived, strict=True)
            if gradient is not None
        ]
        if begun:
            edges, arrived = zip(*begun, strict=True)
            parameters = [parameter for one in together for parameter in one.parameters]
            add_gradients(edges, arrived, parameters, retain_graph=True)
