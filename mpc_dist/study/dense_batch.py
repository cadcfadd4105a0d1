"""Many copies of one fully connected chain, each with windows of its own, trained side by side.

The gradients are those of `mpc_dist.gradient`, with the vector-Jacobian products written by hand: one backward sweep in
which the adjoints of all readouts that are still needed cross each block together. States are (copy, feature, sample):
a product with a small weight matrix on the left is several times faster than one on the right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpc_dist.models import Chain
from mpc_dist.models.residual_mlp import DenseBlock
from mpc_dist.readout import FixedLinear, Identity, mean_squared_error
from mpc_dist.windows import Windows


@dataclass(frozen=True)
class Layer:
    """What all copies of a block share, and where its weights lie among those of the chain."""

    in_features: int
    out_features: int
    residual: bool
    relu: bool
    bias: bool
    offset: int
    """Of the weight in a copy's flat parameters; the bias follows it."""

    @property
    def num_weights(self) -> int:
        """Entries of the weight matrix."""
        return self.in_features * self.out_features

    @property
    def end(self) -> int:
        """Where the next layer's parameters begin."""
        return self.offset + self.num_weights + (self.out_features if self.bias else 0)


@dataclass(frozen=True)
class Crossing:
    """What crosses a block on the way back, in all copies."""

    first: int
    """The lowest slot that crosses; a slot is the place of a readout among those that any copy uses."""
    last: int
    picks: tuple[tuple[Tensor, Tensor | None], ...]
    """Slots from `first` on that each copy's weights learn from, with weights; None where all are 1."""


@dataclass(frozen=True)
class Pass:
    """What a forward pass leaves for the way back."""

    states: list[Tensor]
    """x(0)..x(T)."""
    slopes: list[Tensor | None]
    """Of each block's ReLU, 0 or 1; None where it has none."""


class Room:
    """Memory for the adjoints of one sweep, used again for the next: fresh pages would cost more than the products."""

    def __init__(self, like: Tensor, *, num_copies: int, width: int, num_slots: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self.adjoints = like.new_empty(num_copies, width, num_slots, num_samples)
        """For each slot, dL(x(s))/dx at the boundary that the sweep has reached."""
        self._scratch = [like.new_empty(self.adjoints.numel()) for _ in range(2)]

    def take(self, which: int, shape: Sequence[int]) -> Tensor:
        """One of two scratch tensors, in that shape and contiguous."""
        return self._scratch[which][: math.prod(shape)].view(*shape)


class DenseBatch:
    """Copies of a chain of dense blocks, which start from the same weights; `windows` has those of each copy."""

    def __init__(self, chain: Chain, windows: Sequence[Windows]) -> None:
        for one in windows:
            chain.check_windows(one)
        self._layers = _read_layers(chain)
        self._readouts = _read_matrices(chain)
        self._num_copies = len(windows)
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in chain.parameters()])
        self.parameters = flat.repeat(self._num_copies, 1)
        """(copy, parameter), in the order of the chain's parameters."""
        self._weights = [self._view_weight(self.parameters, layer) for layer in self._layers]
        self._biases = [self._view_bias(self.parameters, layer) if layer.bias else None for layer in self._layers]
        used = sorted({readout for one in windows for readout in one.readouts})
        self._slot_of = {readout: slot for slot, readout in enumerate(used)}
        self._crossings = [self._find_crossing(windows, block) for block in range(chain.num_blocks)]
        self._room: Room | None = None
        self._rows = torch.arange(self._num_copies)

    def load(self, chain: Chain, copy: int) -> None:
        """Write a copy's parameters into a chain of the same model."""
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(self.parameters[copy], chain.parameters())

    def rate_factors(self, residual: float) -> Tensor:
        """For each parameter of a copy, 1, or the given factor if it belongs to a residual block."""
        return torch.cat(
            [
                self.parameters.new_full((layer.end - layer.offset,), residual if layer.residual else 1.0)
                for layer in self._layers
            ]
        )

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of each copy at the last boundary."""
        return _mean_squares(self._forward(inputs).states[-1] - labels.T)

    def gradients(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of each copy by its own windows (copy, parameter), and the losses at the last boundary."""
        forward, target = self._forward(inputs), labels.T
        num_samples, last = len(inputs), len(self._layers) - 1
        scale = 2.0 / target.numel()
        error = forward.states[-1] - target
        room = self._find_room(num_samples)
        adjoints = room.adjoints
        parts: list[Tensor] = []
        for block in reversed(range(len(self._layers))):
            layer, crossing = self._layers[block], self._crossings[block]
            if block == last:
                arriving = (error * scale).unsqueeze(2)
            else:
                self._read(adjoints, block + 1, forward.states[block + 1], target, scale)
                arriving = adjoints[:, :, crossing.first : crossing.last + 1]
            slopes = forward.slopes[block]
            inner = room.take(0, arriving.shape)
            inner = torch.mul(arriving, 1 if slopes is None else slopes.unsqueeze(2), out=inner)
            aim = self._pick(inner, crossing)
            if layer.bias:
                parts.append(aim.sum(2))
            parts.append(torch.matmul(aim, forward.states[block].transpose(-1, -2)).flatten(1))
            if block > 0:
                self._pull_back(room, inner, block)
        return torch.cat(parts[::-1], dim=1), _mean_squares(error)

    def _forward(self, inputs: Tensor) -> Pass:
        state: Tensor = inputs.T
        states, slopes = [state], list[Tensor | None]()
        for layer, weight, bias in zip(self._layers, self._weights, self._biases, strict=True):
            out = torch.matmul(weight, state)
            if bias is not None:
                out += bias
            # A float, not a truth value: products with it are vectorised.
            slopes.append(torch.gt(out, 0, out=torch.empty_like(out)) if layer.relu else None)
            if layer.relu:
                out.relu_()
            state = out.add_(state) if layer.residual else out
            states.append(state)
        return Pass(states, slopes)

    def _find_room(self, num_samples: int) -> Room:
        if self._room is None or self._room.num_samples != num_samples:
            width, num_slots = self._layers[0].out_features, len(self._slot_of)
            self._room = Room(
                self.parameters,
                num_copies=self._num_copies,
                width=width,
                num_slots=num_slots,
                num_samples=num_samples,
            )
        return self._room

    def _read(self, adjoints: Tensor, boundary: int, state: Tensor, target: Tensor, scale: float) -> None:
        """Put dL(x(s))/dx(s) of this boundary into its slot, if any copy reads there."""
        if boundary not in self._slot_of:
            return
        matrix = self._readouts[boundary]
        error = state - target if matrix is None else matrix.T @ (matrix @ state - target)
        torch.mul(error, scale, out=adjoints[:, :, self._slot_of[boundary]])

    def _pick(self, adjoints: Tensor, crossing: Crossing) -> Tensor:
        """The weighted sum of the adjoints that each copy's weights learn from."""
        total: Tensor | None = None
        for slots, weights in crossing.picks:
            part = adjoints[self._rows, :, slots]
            part = part if weights is None else part * weights
            total = part if total is None else total + part
        assert total is not None
        return total

    def _pull_back(self, room: Room, inner: Tensor, block: int) -> None:
        """Carry those adjoints that cross the block below too over this one; `inner` is what passed its ReLU."""
        layer, here, below = self._layers[block], self._crossings[block], self._crossings[block - 1]
        first = below.first + (below.first == self._slot_of.get(block))  # the readout at x(block) enters below
        if first > below.last:
            return
        moved = inner[:, :, first - here.first : below.last - here.first + 1]
        out = room.take(1, (self._num_copies, layer.in_features, *moved.shape[2:]))
        torch.bmm(self._weights[block].transpose(1, 2), moved.flatten(2), out=out.flatten(2))
        place = room.adjoints[:, :, first : below.last + 1]
        if layer.residual:
            place.add_(out)
        else:
            place.copy_(out)

    def _find_crossing(self, windows: Sequence[Windows], block: int) -> Crossing:
        slots = [self._slot_of[readout] for one in windows for readout in one.readouts_crossing(block)]
        first, last = min(slots), max(slots)
        most = max(len(one.targets[block]) for one in windows)
        picks = []
        for number in range(most):
            # A copy with fewer targets takes its first once more, with weight 0.
            aims = [one.targets[block][number] if number < len(one.targets[block]) else None for one in windows]
            chosen = [aim or (one.targets[block][0][0], 0.0) for aim, one in zip(aims, windows, strict=True)]
            indices = torch.tensor([self._slot_of[readout] - first for readout, _ in chosen])
            weights = torch.tensor([weight for _, weight in chosen], dtype=self.parameters.dtype).view(-1, 1, 1)
            picks.append((indices, None if bool((weights == 1).all()) else weights))
        return Crossing(first, last, tuple(picks))

    def _view_weight(self, flat: Tensor, layer: Layer) -> Tensor:
        part = flat[:, layer.offset : layer.offset + layer.num_weights]
        return part.view(self._num_copies, layer.out_features, layer.in_features)

    def _view_bias(self, flat: Tensor, layer: Layer) -> Tensor:
        return flat[:, layer.offset + layer.num_weights : layer.end].unsqueeze(2)


def _mean_squares(error: Tensor) -> Tensor:
    return error.square().mean(dim=(1, 2))


def _read_layers(chain: Chain) -> list[Layer]:
    layers: list[Layer] = []
    for block in chain.blocks:
        if not isinstance(block, DenseBlock):
            raise ValueError(f"copies are trained side by side of dense blocks only, got {type(block).__name__}")
        linear = block.linear
        offset = layers[-1].end if layers else 0
        layers.append(
            Layer(linear.in_features, linear.out_features, block.residual, block.relu, linear.bias is not None, offset)
        )
    if len(layers) < 2 or len({layer.out_features for layer in layers[:-1]}) > 1:
        raise ValueError(f"copies need 2 blocks or more, with interior states of one width; got {len(layers)} blocks")
    if chain.loss is not mean_squared_error:
        raise ValueError("copies are trained side by side on regression only; use data 'linear' or 'trigonometric'")
    return layers


def _read_matrices(chain: Chain) -> dict[int, Tensor | None]:
    """The fixed map of each readout; None where the state itself is read."""
    return {boundary: _read_matrix(chain.readouts[str(boundary)], boundary) for boundary in chain.boundaries}


def _read_matrix(readout: nn.Module, boundary: int) -> Tensor | None:
    if isinstance(readout, Identity):
        return None
    if isinstance(readout, FixedLinear):
        return readout.matrix
    raise ValueError(
        f"the readout at boundary {boundary} is trained ({type(readout).__name__}); "
        "copies side by side need readout identity, pool or project"
    )
