"""A backward pass in two halves: first the input gradient, later the weight gradients, no activation gradient twice.

Where the graph that leads to the input meets a branch that leads only to weights, the gradient that arrives there is
kept in the first half; the second half starts from those, one branch at a time, and never walks the first's path again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from mpc_dist.runtime.engine import add_gradients


@dataclass(frozen=True)
class WeightHalf:
    """What the weight half of a backward pass needs."""

    branches: tuple[tuple[tuple[GradientEdge, ...], tuple[Tensor, ...], tuple[Tensor, ...]], ...]
    """(where each branch starts, the gradients that arrived there, the parameters at its end)."""

    def run(self) -> None:
        """Add the weight gradients to the parameters' `.grad`."""
        for edges, arrived, parameters in self.branches:
            add_gradients(edges, arrived, parameters, retain_graph=True)


def run_input_half(
    output: Tensor, adjoint: Tensor, source: Tensor, parameters: Sequence[Tensor]
) -> tuple[Tensor, WeightHalf]:
    """The gradient at `source`, and what is left to do for the parameters.

    A parameter that is used in several places, or that the input's path never meets, gets its gradient here and now.
    """
    meeting_points, direct = _find_branches(output, source, parameters)
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [
        node.register_prehook(lambda gradients, node=node: arrived.__setitem__(node, gradients))
        for node in meeting_points
    ]
    try:
        add_gradients([output], [adjoint], [source, *direct], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    below, source.grad = source.grad, None
    if below is None:
        below = torch.zeros_like(source)
    branches = []
    for node, ends in meeting_points.items():
        given = [(GradientEdge(node, slot), value) for slot, value in enumerate(arrived[node]) if value is not None]
        branches.append((tuple(e for e, _ in given), tuple(v for _, v in given), tuple(ends)))
    return below, WeightHalf(tuple(branches))


def _find_branches(
    output: Tensor, source: Tensor, parameters: Sequence[Tensor]
) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """The nodes at which weight branches leave the path to the source, with their parameters; and all others."""
    source_node = get_gradient_edge(source).node
    parameter_at = {get_gradient_edge(parameter).node: parameter for parameter in parameters}
    order = _topological_order(output)
    leads_to_source: set[Node] = set()
    for node in reversed(order):
        if node is source_node or any(below in leads_to_source for below, _ in node.next_functions):
            leads_to_source.add(node)
    # For every parameter, the nodes on the path to the source from which a branch of other nodes leads to it.
    starts: dict[Node, set[Node]] = {node: set() for node in parameter_at}
    reachable: dict[Node, set[Node]] = {}  # off the path: parameter nodes below
    for node in reversed(order):
        below = [child for child, _ in node.next_functions if child is not None]
        found = {node} if node in parameter_at else set()
        for child in below:
            if child not in leads_to_source:
                found |= reachable[child]
        if node in leads_to_source:
            for parameter_node in found:
                starts[parameter_node].add(node)
        else:
            reachable[node] = found
    meeting_points: dict[Node, list[Tensor]] = {}
    direct = []
    for parameter_node, nodes in starts.items():
        if len(nodes) == 1:
            meeting_points.setdefault(next(iter(nodes)), []).append(parameter_at[parameter_node])
        else:
            direct.append(parameter_at[parameter_node])
    return meeting_points, direct


def _topological_order(output: Tensor) -> list[Node]:
    """Every node of the graph, each before those it passes gradients to."""
    root = output.grad_fn
    assert root is not None
    finished: list[Node] = []
    seen: set[Node] = {root}
    stack: list[tuple[Node, int]] = [(root, 0)]
    while stack:
        node, place = stack.pop()
        children = node.next_functions
        while place < len(children):
            child = children[place][0]
            place += 1
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((node, place))
                node, children, place = child, child.next_functions, 0
        finished.append(node)
    return finished[::-1]
