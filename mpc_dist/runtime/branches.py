"""Where, in a graph of autograd, the branches to weights leave the path from the output to the source.

    output --> add --> linear* --> gelu --> linear* --> norm* --> source      * a meeting point: a branch begins here
                 `-------------------------------------------------^

There a backward pass is cut in two: the gradients that arrive in the first half are where the second half begins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_SOURCE, _NOWHERE = "source", -1
_Shape = list[Any]
"""The type of every node and where its edges lead, by places in the walk; of each leaf, which tensor it is."""


class Round(NamedTuple):
    """Meeting points of which none lies behind another, so that their branches can be run at once."""

    edges: slice
    """Which of all edges of a graph are theirs."""
    parameters: tuple[Tensor, ...]
    """At the ends of their branches, and of no others'."""


class _Found(NamedTuple):
    """The branches in every graph of one shape."""

    edges: tuple[tuple[int, int], ...]
    """Where gradients arrive at meeting points: the place of a node in the walk, and which of its forward outputs."""
    rounds: tuple[Round, ...]
    direct: tuple[Tensor, ...]
    """Parameters that are used in several places, or that the path never meets."""


@dataclass
class BranchFinder:
    """Finds the branches in the graphs of one block, which mostly are alike from micro-batch to micro-batch."""

    parameters: Sequence[Tensor]
    """Those that are trained."""
    _shape: _Shape = field(default_factory=list)
    """Of the graph that was searched last."""
    _found: _Found = field(default=_Found((), (), ()))

    def find(self, output: Tensor, source: Tensor) -> tuple[list[GradientEdge], tuple[Round, ...], tuple[Tensor, ...]]:
        """Of the graph from this output to this source: all edges at which gradients arrive, the rounds, and the
        parameters that are used in several places or that the path never meets."""
        nodes, shape = _walk(output, source)
        if shape != self._shape:
            self._shape, self._found = shape, _search(nodes, output, source, self.parameters)
        places, rounds, direct = self._found
        return [GradientEdge(nodes[place], slot) for place, slot in places], rounds, direct


def _walk(output: Tensor, source: Tensor) -> tuple[list[Node], _Shape]:
    """Every node of the graph, those near the output first, and the graph's shape.

    Which tensor a leaf is belongs to the shape: a block may use other weights the next time.
    """
    root = output.grad_fn
    assert root is not None
    nodes, places = [root], {root: 0}
    shape: _Shape = [output.output_nr]
    for node in nodes:  # which grows meanwhile
        shape.append(type(node))
        if isinstance(node, _Leaf):
            leaf = node.variable
            shape.append(_SOURCE if leaf is source else id(leaf))
            continue
        for child, slot in node.next_functions:
            if child is None:
                shape.append(_NOWHERE)
                continue
            place = places.get(child)
            if place is None:
                place = places[child] = len(nodes)
                nodes.append(child)
            shape += (place, slot)
    return nodes, shape


def _search(nodes: Sequence[Node], output: Tensor, source: Tensor, parameters: Sequence[Tensor]) -> _Found:
    """Look through a graph."""
    places = {node: place for place, node in enumerate(nodes)}
    edges = [[(places[child], slot) for child, slot in node.next_functions if child is not None] for node in nodes]
    children = [[child for child, _ in own] for own in edges]
    order = _order_from_root(children)
    trained = {id(parameter) for parameter in parameters}
    leaves = {place: node.variable for place, node in enumerate(nodes) if isinstance(node, _Leaf)}
    ends = {place: leaf for place, leaf in leaves.items() if id(leaf) in trained}
    path: set[int] = set()
    for place in reversed(order):
        if leaves.get(place) is source or not path.isdisjoint(children[place]):
            path.add(place)
    beginnings = _find_beginnings(order, children, path, ends)
    # A compiled block is one node, which gives all its gradients whenever it is asked for one: none can wait.
    compiled = {place for place, node in enumerate(nodes) if node.name() == "CompiledFunctionBackward"}
    beginnings = {end: begun if begun.isdisjoint(compiled) else set() for end, begun in beginnings.items()}
    points: dict[int, list[Tensor]] = {}
    for end, begun in beginnings.items():
        if len(begun) == 1:
            points.setdefault(next(iter(begun)), []).append(ends[end])
    slots: dict[int, set[int]] = {place: set() for place in points}
    for place, slot in ((0, output.output_nr), *(edge for own in edges for edge in own)):
        if place in slots:
            slots[place].add(slot)
    depths = _measure_depths(order, children, points)
    found: list[tuple[int, int]] = []
    rounds = []
    for depth in sorted(set(depths.values())):
        together = [place for place in depths if depths[place] == depth]
        before = len(found)
        found += [(place, slot) for place in together for slot in sorted(slots[place])]
        own = tuple(parameter for place in together for parameter in points[place])
        rounds.append(Round(slice(before, len(found)), own))
    return _Found(tuple(found), tuple(rounds), tuple(ends[end] for end, begun in beginnings.items() if len(begun) != 1))


def _find_beginnings(
    order: Sequence[int], children: Sequence[Sequence[int]], path: set[int], ends: Mapping[int, Tensor]
) -> dict[int, set[int]]:
    """For every parameter's place, the nodes of the path from which a branch of other nodes leads to it."""
    beginnings: dict[int, set[int]] = {place: set() for place in ends}
    reached: dict[int, set[int]] = {}  # by node off the path: the parameters behind it
    for place in reversed(order):
        behind = {place} if place in ends else set()
        for child in children[place]:
            behind |= reached.get(child, set())
        if place in path:
            for end in behind:
                beginnings[end].add(place)
        else:
            reached[place] = behind
    return beginnings


def _measure_depths(
    order: Sequence[int], children: Sequence[Sequence[int]], points: Mapping[int, object]
) -> dict[int, int]:
    """How many other meeting points at most lie between the output and each of them."""
    depths = dict.fromkeys(order, 0)
    for place in order:
        for child in children[place]:
            depths[child] = max(depths[child], depths[place] + (place in points))
    return {place: depths[place] for place in order if place in points}


def _order_from_root(children: Sequence[Sequence[int]]) -> list[int]:
    """Every place, each before those it passes gradients to."""
    finished: list[int] = []
    seen = {0}
    stack = [(0, iter(children[0]))]
    while stack:
        place, left = stack[-1]
        for child in left:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(children[child])))
                break
        else:
            stack.pop()
            finished.append(place)
    return finished[::-1]
