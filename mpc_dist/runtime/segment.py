"""A segment's blocks at work: forward, relay, backward whole or in halves, for several micro-batches in flight.

Each micro-batch has graphs of its own, from detached inputs; they are freed after the last adjoint that crosses them.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpc_dist.gradient import run_block
from mpc_dist.precision import cast_bytes, gradient_type
from mpc_dist.readout import Loss, check_mean, read_loss
from mpc_dist.runtime.backward import Beginnings, Graph, run_weight_halves
from mpc_dist.runtime.branches import BranchFinder
from mpc_dist.runtime.engine import add_gradients, find_gradients
from mpc_dist.runtime.guard import WIDEST_PROBE, Guard
from mpc_dist.runtime.recompute import KeptInput, Recomputer

Scope = Callable[[int, int], AbstractContextManager[object]]
"""(block, micro-batch) -> the context in which that block runs forward: its precision; it seeds its random numbers."""


@dataclass(frozen=True)
class _Part:
    """Blocks of a segment whose forward pass makes one graph: all, or each alone if it is cut in halves or repeated."""

    blocks: Sequence[nn.Module]
    first_block: int
    parameters: Sequence[nn.Parameter]
    """Those that are trained."""
    finder: BranchFinder

    def make_graph(self, source: Tensor, output: Tensor) -> Graph:
        """What a forward pass from this source left."""
        if output is source:  # blocks that pass their input on: a graph is needed all the same
            output = source.view_as(source)
        return Graph(source, output, self.parameters, self.finder)


@dataclass
class _InFlight:
    """A micro-batch that was run forward and still has adjoints to come."""

    kept: Sequence[Graph | KeptInput]
    """Of each part, in order."""
    uses_left: int
    weight_halves: list[Sequence[Beginnings]] = field(default_factory=list)
    """Of each part, after the input half."""


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
    is_split: bool = False
    """Whether backwards come in two halves."""
    guard: Guard = field(default_factory=Guard)
    """Told of every block's output, and of the factor on the loss."""

    def __post_init__(self) -> None:
        self._in_flight: dict[int, _InFlight] = {}
        self._shares: dict[float, Tensor] = {}
        self.cast_bytes = 0
        """Of autocast's copies of its weights; known once it was checked."""
        self._recomputer = Recomputer(self.scope) if self.is_checkpointed else None
        self._parts = self._divide()
        self._parameters = [parameter for part in self._parts for parameter in part.parameters]
        self._readout_parameters = [] if self.readout is None else [*self.readout.parameters()]
        self._readout_parameters = [p for p in self._readout_parameters if p.requires_grad]
        self._probes = self._choose_probes()

    @property
    def in_flight(self) -> Set[int]:
        """The micro-batches whose activations are held."""
        return self._in_flight.keys()

    def held(self) -> list[Tensor]:
        """Inputs and outputs of the micro-batches in flight, not what graphs save; for another thread."""
        kept = [one for flight in list(self._in_flight.values()) for one in flight.kept]
        return [one.source for one in kept] + [one.output for one in kept if isinstance(one, Graph)]

    def forward(self, microbatch: int, state: Tensor) -> Tensor:
        """Run the blocks; the output is detached."""
        kept: list[Graph | KeptInput] = []
        is_guarded = self.guard.is_on
        for part in self._parts:
            source = state.detach().requires_grad_(state.is_floating_point())
            if self._recomputer is None:
                output = self._run(part, microbatch, source, is_guarded=is_guarded)
                kept.append(part.make_graph(source, output))
            else:
                output, kept_input = self._run_and_forget(part, microbatch, source, is_guarded=is_guarded)
                kept.append(kept_input)
            state = output
        self._in_flight[microbatch] = _InFlight(kept, self.num_uses)
        return state.detach()

    def run_blocks(self, microbatch: int, state: Tensor) -> Tensor:
        """The blocks' output, for an evaluation."""
        for part in self._parts:
            state = self._run(part, microbatch, state)
        return state

    def _run(self, part: _Part, microbatch: int, state: Tensor, *, is_guarded: bool = False) -> Tensor:
        """The output of a part's blocks, with its graph if gradients are enabled; in a step, the guard looks at all."""
        has_graph, scope = state.requires_grad and torch.is_grad_enabled(), self.scope
        for index, block in enumerate(part.blocks, start=part.first_block):
            with scope(index, microbatch):
                state = run_block(block, state, index)
            if has_graph and not state.requires_grad:
                raise self._explain_cut_off(block, index)
            if is_guarded:
                self.guard.see("activation", index, microbatch, state)
        return state

    def _run_and_forget(
        self, part: _Part, microbatch: int, state: Tensor, *, is_guarded: bool
    ) -> tuple[Tensor, KeptInput]:
        """The same of a block that will run again; what is left of it is its input."""
        assert self._recomputer is not None
        (block,) = part.blocks
        output, kept = self._recomputer.run(block, state, part.first_block, microbatch)
        if state.requires_grad and not output.requires_grad:
            raise self._explain_cut_off(block, part.first_block)
        if is_guarded:
            self.guard.see("activation", part.first_block, microbatch, output)
        return output, kept

    def read(self, microbatch: int, state: Tensor, labels: Tensor, share: float | Tensor) -> Reading:
        """Read the loss of the segment's output, and its gradients: the readout's own go to `.grad`.

        `share` is what the micro-batch weighs; 0 where it has no label that counts, and then nothing is read. On a
        device it may be a tensor, which is not 0, and is not looked at.
        """
        if not isinstance(share, Tensor) and not share:
            self._read_nothing(microbatch, state)
            return Reading(torch.zeros((), device=state.device), torch.zeros_like(state))
        leaf = state.detach().requires_grad_()
        loss = self.loss_of(microbatch, leaf, labels)
        weight = self._weigh(loss, share)
        scale = self.guard.scale
        weight = weight if scale is None else weight * scale.value
        add_gradients([loss], [weight], [leaf, *self._readout_parameters], retain_graph=False)
        if leaf.grad is None:
            raise self._explain_unread()
        return Reading(loss.detach(), leaf.grad)

    def _weigh(self, loss: Tensor, share: float | Tensor) -> Tensor:
        """The share, as a gradient of the loss."""
        if isinstance(share, Tensor):
            return share.to(loss.dtype)
        if share not in self._shares:
            self._shares = {share: torch.full_like(loss, share)}  # most often all are alike
        return self._shares[share]

    def _read_nothing(self, microbatch: int, state: Tensor) -> None:
        """Leave what a reading leaves whose loss is 0: zero gradients, and statistics that have moved."""
        assert self.readout is not None
        for parameter in self._readout_parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_type(parameter))
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
        self.cast_bytes = 0
        for index, block in enumerate(self.blocks, start=self.first_block):
            leaf = output.detach().requires_grad_(output.is_floating_point())
            with self.scope(index, 0):
                output = run_block(block, leaf, index)
            self.cast_bytes += cast_bytes(output)
            # Nobody needs the adjoint of the data: there the first block's weights must be reached.
            sources = [leaf] if index else [p for p in block.parameters() if p.requires_grad]
            if sources and output is not leaf and not any(_depends_on(output, source) for source in sources):
                raise self._explain_cut_off(block, index)
        output = output.detach()
        if self.readout is not None and labels is not None:
            leaf = output.clone().requires_grad_()
            prediction = self.predict(0, leaf)
            loss = read_loss(self.loss, prediction, labels)
            self.cast_bytes += cast_bytes(loss)
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
        flight = self._use(microbatch)
        for place in reversed(range(len(self._parts))):
            adjoint = self._open(flight, place, microbatch).relay(adjoint, is_last=not flight.uses_left)
        return adjoint

    def backward(self, microbatch: int, adjoint: Tensor, *, to_input: bool) -> Tensor | None:
        """Add the weight gradients to `.grad`; the adjoint at the input if asked for."""
        flight = self._use(microbatch)
        below: Tensor | None = adjoint
        for place in reversed(range(len(self._parts))):
            assert below is not None
            graph = self._open(flight, place, microbatch)
            below = graph.run_backward(below, to_input=to_input or place > 0, is_last=not flight.uses_left)
        return below

    def input_half(self, microbatch: int, adjoint: Tensor) -> Tensor:
        """The adjoint at the input; what the weight half needs is kept."""
        flight = self._in_flight[microbatch]
        for place in reversed(range(len(self._parts))):
            adjoint, left = self._open(flight, place, microbatch).run_input_half(adjoint)
            flight.weight_halves.append(left)
        return adjoint

    def weight_half(self, microbatch: int) -> None:
        """Add the weight gradients of the input half to `.grad`."""
        flight = self._use(microbatch)
        assert flight.weight_halves, "the input half comes first"
        run_weight_halves(flight.weight_halves)

    def _open(self, flight: _InFlight, place: int, microbatch: int) -> Graph:
        """The graph of a part: kept, or made again."""
        kept, part = flight.kept[place], self._parts[place]
        if isinstance(kept, Graph):
            return kept
        assert self._recomputer is not None
        source = kept.source
        source = source.detach().requires_grad_(source.is_floating_point())
        output = self._recomputer.run_again(part.blocks[0], source, kept, part.first_block, microbatch)
        return part.make_graph(source, output)

    def _use(self, microbatch: int) -> _InFlight:
        """The micro-batch, which is let go before its last use."""
        flight = self._in_flight[microbatch]
        flight.uses_left -= 1
        if flight.uses_left == 0:
            del self._in_flight[microbatch]
        return flight

    def _divide(self) -> list[_Part]:
        """The parts of the segment."""
        size = 1 if self.is_split or self.is_checkpointed else len(self.blocks)
        parts = []
        for place in range(0, len(self.blocks), size):
            blocks = self.blocks[place : place + size]
            trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
            parts.append(_Part(blocks, self.first_block + place, trained, BranchFinder(trained)))
        return parts

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


def _depends_on(output: Tensor, source: Tensor) -> bool:
    """Whether a gradient of the output reaches the source."""
    if not output.requires_grad:
        return False
    (gradient,) = find_gradients(output, torch.ones_like(output), [source], retain_graph=True)
    return gradient is not None
