"""A segment's blocks at work: forward, relay, backward whole or in halves, for several micro-batches in flight.

Each micro-batch has a graph of its own, from a detached input; it is freed after the last adjoint that crosses it.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpc_dist.gradient import run_block
from mpc_dist.readout import Loss, check_mean, read_loss
from mpc_dist.runtime.engine import add_gradients, find_gradient
from mpc_dist.runtime.guard import WIDEST_PROBE, Guard
from mpc_dist.runtime.recompute import Recomputer
from mpc_dist.runtime.split import WeightHalf, run_input_half

Scope = Callable[[int, int], AbstractContextManager[object]]
"""(block, micro-batch) -> the context in which that block runs forward: its precision; it seeds its random numbers."""


@dataclass
class _InFlight:
    """A micro-batch that was run forward and still has adjoints to come."""

    source: Tensor
    output: Tensor
    uses_left: int
    weight_half: WeightHalf | None = None


@dataclass(frozen=True)
class Reading:
    """What the readout at a segment's end gave for one micro-batch."""

    loss: Tensor
    """Detached: the mean over the micro-batch's labels that count."""
    adjoint: Tensor
    """dL/dx at the segment's output, times the micro-batch's share in the step."""


@dataclass
class Segment:
    """Consecutive blocks that share their windows, on one rank."""

    blocks: Sequence[nn.Module]
    first_block: int
    """The index of the first of them in the chain."""
    readout: nn.Module | None
    """What reads a loss at the segment's end, if anything does."""
    loss: Loss
    num_uses: int
    """How many relays and backwards cross it per micro-batch."""
    scope: Scope = field(default=lambda _block, _microbatch: nullcontext())
    is_checkpointed: bool = False
    """Whether each block keeps only its input and runs again in backward."""
    guard: Guard = field(default_factory=Guard)
    """Told of every block's output, and of the factor on the loss."""

    def __post_init__(self) -> None:
        self._in_flight: dict[int, _InFlight] = {}
        self._shares: dict[float, Tensor] = {}
        self._recomputer = Recomputer(self.scope) if self.is_checkpointed else None
        self._parameters = [p for block in self.blocks for p in block.parameters() if p.requires_grad]
        self._readout_parameters = [] if self.readout is None else [*self.readout.parameters()]
        self._readout_parameters = [p for p in self._readout_parameters if p.requires_grad]
        self._probes = self._choose_probes()

    @property
    def in_flight(self) -> Set[int]:
        """The micro-batches whose activations are held."""
        return self._in_flight.keys()

    def held(self) -> list[Tensor]:
        """Inputs and outputs of the micro-batches in flight, not what graphs save; for another thread."""
        return [tensor for flight in list(self._in_flight.values()) for tensor in (flight.source, flight.output)]

    def forward(self, microbatch: int, state: Tensor) -> Tensor:
        """Run the blocks; the output is detached."""
        source = state.detach().requires_grad_(state.is_floating_point())
        output = self.run_blocks(microbatch, source, is_guarded=self.guard.is_on)
        if output is source:  # blocks that pass their input on: a graph is needed all the same
            output = source.view_as(source)
        self._in_flight[microbatch] = _InFlight(source, output, self.num_uses)
        return output.detach()

    def run_blocks(self, microbatch: int, state: Tensor, *, is_guarded: bool = False) -> Tensor:
        """The blocks' output, with its graph if gradients are enabled; in a step, the guard looks at each state."""
        has_graph = state.requires_grad and torch.is_grad_enabled()
        for index, block in enumerate(self.blocks, start=self.first_block):
            state = self._run_block(block, state, index, microbatch)
            if has_graph and not state.requires_grad:
                raise self._explain_cut_off(block, index)
            if is_guarded:
                self.guard.see("activation", index, microbatch, state)
        return state

    def _run_block(self, block: nn.Module, state: Tensor, index: int, microbatch: int) -> Tensor:
        if self._recomputer is not None and torch.is_grad_enabled():
            return self._recomputer.run(block, state, index, microbatch)
        with self.scope(index, microbatch):
            return run_block(block, state, index)

    def read(self, microbatch: int, state: Tensor, labels: Tensor, share: float) -> Reading:
        """Read the loss of the segment's output, and its gradients: the readout's own go to `.grad`.

        `share` is what the micro-batch weighs; 0 where it has no label that counts, and then nothing is read.
        """
        if not share:
            self._read_nothing(microbatch, state)
            return Reading(torch.zeros((), device=state.device), torch.zeros_like(state))
        leaf = state.detach().requires_grad_()
        loss = self.loss_of(microbatch, leaf, labels)
        if share not in self._shares:
            self._shares = {share: torch.full_like(loss, share)}  # most often all are alike
        scale = self.guard.scale
        weight = self._shares[share] if scale is None else self._shares[share] * scale.value
        add_gradients([loss], [weight], [leaf, *self._readout_parameters], retain_graph=False)
        if leaf.grad is None:
            raise self._explain_unread()
        return Reading(loss.detach(), leaf.grad)

    def _read_nothing(self, microbatch: int, state: Tensor) -> None:
        """Leave what a reading leaves whose loss is 0: zero gradients, and statistics that have moved."""
        assert self.readout is not None
        for parameter in self._readout_parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if next(self.readout.buffers(), None) is not None:
            with torch.no_grad():
                self.predict(microbatch, state)

    def loss_of(self, microbatch: int, state: Tensor, labels: Tensor) -> Tensor:
        """The loss that the readout makes of the segment's output."""
        loss = read_loss(self.loss, self.predict(microbatch, state), labels)
        if not loss.requires_grad:
            raise self._explain_unread()
        return loss

    def check(self, state: Tensor, labels: Tensor | None) -> Tensor:
        """Raise if the blocks or the readout cannot be trained on a micro-batch like this; else the blocks' output."""
        output = state
        for index, block in enumerate(self.blocks, start=self.first_block):
            leaf = output.detach().requires_grad_(output.is_floating_point())
            output = self._run_block(block, leaf, index, 0)
            # Nobody needs the adjoint of the data: there the first block's weights must be reached.
            sources = [leaf] if index else [p for p in block.parameters() if p.requires_grad]
            if sources and output is not leaf and not any(_depends_on(output, source) for source in sources):
                raise self._explain_cut_off(block, index)
        output = output.detach()
        if self.readout is not None and labels is not None:
            leaf = output.clone().requires_grad_()
            prediction = self.predict(0, leaf)
            loss = read_loss(self.loss, prediction, labels)
            if not _depends_on(loss, leaf):
                raise self._explain_unread()
            check_mean(self.loss, prediction.detach(), labels)
        return output

    def _explain_cut_off(self, block: nn.Module, index: int) -> ValueError:
        return ValueError(
            f"block {index} ({type(block).__name__}) gives a state that is cut off from its input (detached, or "
            "computed without gradients), so no block below it could learn; return the state as computed"
        )

    def _explain_unread(self) -> ValueError:
        return ValueError(
            f"the loss read after block {self.range[-1]} does not depend on the block's state, so nothing could learn "
            "from it; check that the readout uses the state, and the loss the prediction"
        )

    def predict(self, microbatch: int, state: Tensor) -> Tensor:
        """What the readout makes of the segment's output."""
        assert self.readout is not None
        # In the scope of its boundary, negated so that it is no block's.
        with self.scope(-(self.first_block + len(self.blocks)), microbatch):
            prediction: Tensor = self.readout(state)
        return prediction

    def relay(self, microbatch: int, adjoint: Tensor) -> Tensor:
        """The adjoint at the input; weights are not touched."""
        flight = self._in_flight[microbatch]
        below = find_gradient(flight.output, adjoint, flight.source, retain_graph=flight.uses_left > 1)
        self._use(microbatch)
        return torch.zeros_like(flight.source) if below is None else below

    def backward(self, microbatch: int, adjoint: Tensor, *, to_input: bool) -> Tensor | None:
        """Add the weight gradients to `.grad`; the adjoint at the input if asked for."""
        flight = self._in_flight[microbatch]
        sources = [*self._parameters, *([flight.source] if to_input else [])]
        if flight.output.requires_grad and sources:
            add_gradients([flight.output], [adjoint], sources, retain_graph=flight.uses_left > 1)
        below, flight.source.grad = flight.source.grad, None
        if to_input and below is None:
            below = torch.zeros_like(flight.source)
        self._use(microbatch)
        return below

    def input_half(self, microbatch: int, adjoint: Tensor) -> Tensor:
        """The adjoint at the input; what the weight half needs is kept."""
        flight = self._in_flight[microbatch]
        below, flight.weight_half = run_input_half(flight.output, adjoint, flight.source, self._parameters)
        return below

    def weight_half(self, microbatch: int) -> None:
        """Add the weight gradients of the input half to `.grad`."""
        half = self._in_flight[microbatch].weight_half
        assert half is not None, "the input half comes first"
        half.run()
        self._use(microbatch)

    @property
    def block_parameters(self) -> Sequence[nn.Parameter]:
        """Those of its blocks that are trained."""
        return self._parameters

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """All that are trained, the readout's last."""
        return [*self._parameters, *self._readout_parameters]

    @property
    def range(self) -> range:
        """The indices of its blocks."""
        return range(self.first_block, self.first_block + len(self.blocks))

    def see_backward(self, microbatch: int) -> None:
        """Let the guard look at one small gradient of each block, which tells the micro-batch of a mistake."""
        blocks, parameters = self._probes
        self.guard.see_gradients(blocks, parameters, microbatch)

    def see_gradients(self) -> None:
        """Let the guard look at all gradients, which are complete."""
        blocks = [t for t, block in zip(self.range, self.blocks, strict=True) for p in block.parameters()]
        readout = [] if self.readout is None else [*self.readout.parameters()]
        parameters = [p for block in self.blocks for p in block.parameters()]
        self.guard.see_gradients([*blocks, *[self.range[-1]] * len(readout)], [*parameters, *readout])

    def _choose_probes(self) -> tuple[list[int], list[nn.Parameter]]:
        """The first small parameter of each block: what goes wrong on the way back through the block reaches it."""
        found: dict[int, nn.Parameter] = {}
        for index, block in zip(self.range, self.blocks, strict=True):
            small = [p for p in block.parameters() if p.requires_grad and p.numel() <= WIDEST_PROBE]
            found |= {index: small[0]} if small else {}
        return list(found), list(found.values())

    def _use(self, microbatch: int) -> None:
        flight = self._in_flight[microbatch]
        flight.uses_left -= 1
        if flight.uses_left == 0:
            del self._in_flight[microbatch]


def _depends_on(output: Tensor, source: Tensor) -> bool:
    """Whether a gradient of the output reaches the source."""
    if not output.requires_grad:
        return False
    return find_gradient(output, torch.ones_like(output), source, retain_graph=True) is not None
