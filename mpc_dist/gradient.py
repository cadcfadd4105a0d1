"""The definition of the MPC gradient, and an eager sweep that gives the same numbers in less memory.

For every block t (Ren & Li, arXiv 2409.19561; with the paper's windows, h = 1 is forward-forward and h = T is
back-propagation):

    g(u(t)) = sum over its targets (s, w) of  w * dL(x(s)) / du(t)

L is the mean over the labels of the whole step that count, however it is cut into micro-batches and over replicas. A
readout's own weights take dL(x(s)) / d(weights), unweighted. Parameters that do not require gradients, and
readouts at which no block aims, have no entry in the result.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpc_dist.models.chain import Chain
from mpc_dist.precision import FULL, Precision
from mpc_dist.readout import count_labels
from mpc_dist.windows import Windows

Gradients = dict[str, Tensor]
"""The gradient of each parameter, by its name in `Chain.named_parameters()`."""


def mpc_gradients(
    model: Chain,
    inputs: Tensor,
    labels: Tensor,
    windows: Windows,
    *,
    precision: Precision = FULL,
    sent_at: Collection[int] = (),
) -> Gradients:
    """Every parameter's gradient by the formula, plainly: one graph, and one differentiation per block.

    This is the oracle: whatever else computes an MPC gradient is compared with it. Blocks and readouts compute in the
    precision; states are sent to another rank at the boundaries `sent_at`, which may round them and their adjoints.
    """
    model.check_windows(windows)
    state, losses = inputs, {}
    for boundary, block in enumerate(model.blocks, start=1):
        with precision.scope(state.device):
            state = run_block(block, state, boundary - 1)
        if boundary in windows.readouts:
            losses[boundary] = _read(model, boundary, state, labels, precision)
        if boundary in sent_at:
            state = precision.round(state)

    gradients: Gradients = {}
    for t, targets in enumerate(windows.targets):
        aim = sum(weight * losses[boundary] for boundary, weight in targets)
        assert isinstance(aim, Tensor)
        gradients |= _differentiate(aim, f"blocks.{t}.", model.blocks[t])
    for boundary, loss in losses.items():
        gradients |= _differentiate(loss, f"readouts.{boundary}.", model.readouts[str(boundary)])
    return gradients


def eager_mpc_gradients(
    model: Chain, inputs: Tensor, labels: Tensor, windows: Windows, *, precision: Precision = FULL
) -> Gradients:
    """The same gradients by one forward sweep that holds only the blocks that a later readout still needs.

    At each readout its adjoint runs back to the lowest block that aims there; then the blocks that no later readout
    crosses are freed. For sliding windows at most h blocks are held, so memory is affine in h: M(h) = a*h + b.
    """
    gradients: Gradients = {}
    for name, part in sweep(model, inputs, labels, windows, precision=precision):
        gradients[name] = gradients[name] + part if name in gradients else part
    return {name: gradients[name] for name, _ in model.named_parameters() if name in gradients}


def sweep(
    model: Chain, inputs: Tensor, labels: Tensor, windows: Windows, *, precision: Precision = FULL
) -> Iterator[tuple[str, Tensor]]:
    """The eager sweep as it goes: parts of parameters' gradients, to be summed by name."""
    model.check_windows(windows)
    held: dict[int, HeldBlock] = {}
    state = inputs
    for t, block in enumerate(model.blocks):
        held[t] = HeldBlock.run(block, state, t, precision)
        boundary, state = t + 1, held[t].output.detach()
        if boundary not in windows.readouts:
            continue

        own = list(_trainable(model.readouts[str(boundary)]))
        leaf = state.requires_grad_()
        loss = _read(model, boundary, leaf, labels, precision)
        adjoint, *values = _grad(loss, [leaf, *(parameter for _, parameter in own)])
        yield from ((f"readouts.{boundary}.{name}", value) for (name, _), value in zip(own, values, strict=True))
        del loss, leaf, values

        for crossed in reversed(windows.blocks_crossed_by(boundary)):
            goes_on = crossed > windows.stop_of(boundary)
            weight_gradients, below = held[crossed].pull_back(
                adjoint, weights=windows.is_target(crossed, boundary), to_input=goes_on
            )
            weight = windows.weight(crossed, boundary)
            yield from ((f"blocks.{crossed}.{name}", weight * part) for name, part in weight_gradients.items())
            if goes_on:
                assert below is not None
                adjoint = below
            if windows.last_readout_crossing(crossed) == boundary:
                del held[crossed]
    assert not held


@dataclass(frozen=True)
class HeldBlock:
    """A block's forward pass kept for its adjoints: a graph of this block alone, from a detached input."""

    block: nn.Module
    input: Tensor
    output: Tensor

    @classmethod
    def run(cls, block: nn.Module, state: Tensor, index: int, precision: Precision = FULL) -> "HeldBlock":
        """Run block `index` on the state; adjoints can pass to it if it is real-valued (raw inputs may be tokens)."""
        leaf = state.detach().requires_grad_(state.is_floating_point())
        with precision.scope(state.device):
            return cls(block, leaf, run_block(block, leaf, index))

    def pull_back(self, adjoint: Tensor, *, weights: bool, to_input: bool) -> tuple[Gradients, Tensor | None]:
        """The weight gradients and the adjoint at the input, each only if asked for; the graph is kept."""
        named = list(_trainable(self.block)) if weights else []
        sources = [parameter for _, parameter in named] + ([self.input] if to_input else [])
        if not sources:
            return {}, None
        values = _grad(self.output, sources, adjoint)
        below = values.pop() if to_input else None
        return {name: value for (name, _), value in zip(named, values, strict=True)}, below


def run_block(block: nn.Module, state: Tensor, index: int) -> Tensor:
    """The output of block `index`; raises if no adjoint could pass it, or if it modifies its input.

    A readout or another block may still need the input.
    """
    version = state._version
    try:
        output = block(state)
    except RuntimeError as error:
        # Autograd's own words for a leaf, which the input is, and the block's weights.
        if "in-place operation" not in str(error):
            raise
        raise ValueError(
            f"block {index} ({type(block).__name__}) modifies its input in place, or a weight of its own; make that "
            "operation out of place"
        ) from error
    if version == state._version and isinstance(output, Tensor) and output.is_floating_point():
        return output
    if version != state._version:
        wrong = "modifies its input in place; make its first operation out of place"
    elif not isinstance(output, Tensor):
        wrong = f"returns a {type(output).__name__}; a block gives one tensor: wrap it so that it does"
    else:
        wrong = (
            f"gives states of type {output.dtype}, through which no adjoint can pass; let it give real values, or put "
            "it and the next block into one"
        )
    raise ValueError(f"block {index} ({type(block).__name__}) {wrong}")


def _read(model: Chain, boundary: int, state: Tensor, labels: Tensor, precision: Precision) -> Tensor:
    """L(x(s)); 0 if no label counts, where a mean would not be a number."""
    if not count_labels(model.loss, labels):
        return model.predict(boundary, state).sum() * 0
    return model.loss_at(boundary, state, labels, precision)


def _differentiate(loss: Tensor, prefix: str, module: nn.Module) -> Gradients:
    named = list(_trainable(module))
    values = _grad(loss, [parameter for _, parameter in named]) if named else []
    return {prefix + name: value for (name, _), value in zip(named, values, strict=True)}


def _trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _grad(output: Tensor, sources: Sequence[Tensor], adjoint: Tensor | None = None) -> list[Tensor]:
    """d(output . adjoint) / d(sources), zeros for a source that the output does not depend on; the graph is kept."""
    if not output.requires_grad:
        return [torch.zeros_like(source) for source in sources]
    return list(
        torch.autograd.grad(output, sources, adjoint, retain_graph=True, allow_unused=True, materialize_grads=True)
    )
