"""One rank's stage: its blocks and readouts, its executor, its optimizer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from mpc_dist.precision import FULL, Precision, gradient_type, gradients_as_weights, sum_in_float32
from mpc_dist.readout import Loss, Shared
from mpc_dist.runtime.clock import clock_of
from mpc_dist.runtime.compiled import compile_blocks
from mpc_dist.runtime.executor import Executor, StepRecord
from mpc_dist.runtime.guard import Guard, Policy
from mpc_dist.runtime.loss_scale import LossScale
from mpc_dist.runtime.microbatch import MicroBatches, Shares
from mpc_dist.runtime.randomness import Randomness, list_generators
from mpc_dist.runtime.reducer import Travel
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.segment import Scope, Segment
from mpc_dist.runtime.shared_head import SharedHead
from mpc_dist.runtime.transport import Transport
from mpc_dist.runtime.zero import ZeroOptimizer
from mpc_dist.schedule import Layout, Schedule
from mpc_dist.schedule.action import Action, Op
from mpc_dist.schedule.work import Work

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Sharding = Callable[[torch.optim.Optimizer, nn.Module], ZeroOptimizer]
"""(a stage's optimizer, its modules) -> what shares it among the stage's replicas."""


class Reducer(Protocol):
    """Averages a stage's gradients over its data-parallel replicas."""

    def expect(self, parameters: Sequence[nn.Parameter], coming: Sequence[nn.Parameter]) -> None:
        """The backward that completes these gradients begins; it adds to those of `coming`, the others are complete."""

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """These gradients are complete on this replica."""

    def finish(self) -> Sequence[Travel]:
        """Every started gradient is now the replicas' average; how its way to them went."""


@dataclass(frozen=True)
class StageOptions:
    """How a stage computes."""

    clip_norm: float | None = None
    """Gradients are scaled down to this norm; None: never."""
    clip_scope: Literal["stage", "global"] = "stage"
    """Whose norm it is. `global` makes every rank wait for all others at each update."""
    precision: Precision = FULL
    """In what type forwards compute and states travel; float16 wants a loss scale."""
    checkpoint: bool = False
    """Whether each block keeps only its input and runs again in backward. What it draws from torch's generators is the
    same then; from others, such as Python's `random`, it must draw nothing."""
    compile: bool = False
    """Whether each block is compiled by torch.compile, in place, when it first runs."""
    seed: int = 0
    """What dropout is drawn from."""
    record_times: bool = False
    """Whether every step records when each action ran."""
    on_nonfinite: Policy = "ignore"
    """What a number that is not finite does: stop: raise before the update; skip: leave the update out on all ranks,
    which makes every rank wait for all others at each update; ignore: nothing, and nothing is looked at."""
    loss_scale: LossScale | None = None
    """What the loss scale begins with; None: no scaling."""


class Stage:
    """The part of a pipeline that one rank owns."""

    def __init__(
        self,
        layout: Layout,
        schedule: Schedule,
        rank: int,
        *,
        blocks: Mapping[int, nn.Module],
        readouts: Mapping[int, nn.Module],
        loss: Loss,
        transport: Transport,
        optimizer: OptimizerFactory,
        options: StageOptions,
        reducer: Reducer | None = None,
        sharding: Sharding | None = None,
        shared_head: SharedHead | None = None,
        sum_over_stages: Callable[[float | Tensor], Tensor] | None = None,
        replica: int = 0,
        guard: Guard | None = None,
    ) -> None:
        """`blocks` and `readouts` are this rank's, by their index and boundary in the chain.

        With `sharding`, what it makes reduces and updates in the reducer's and the optimizer's place.
        """
        self.layout = layout
        self.schedule = schedule
        self.rank = rank
        self.blocks = dict(blocks)
        self.readouts = dict(readouts)
        if options.compile:
            compile_blocks(self.blocks.values())
        self.randomness = Randomness(options.seed, replica)
        self._options = options
        self.transport = transport
        self._reducer = reducer
        self._shared_head = shared_head
        scale = None if options.loss_scale is None else replace(options.loss_scale)
        self.guard = Guard(options.on_nonfinite, scale) if guard is None else guard
        self._kept_buffers: list[Tensor] = []
        self._meanwhile: Callable[[], None] | None = None
        self._sum_over_stages = sum_over_stages
        self.parameters = [p for _, p in self.named_parameters() if p.requires_grad]
        sum_in_float32(self.parameters)
        self._summed_wider = [p for p in self.parameters if gradient_type(p) != p.dtype]
        self.optimizer = optimizer(self.parameters) if self.parameters else None
        self.zero: ZeroOptimizer | None = None
        if sharding is not None and self.optimizer is not None:
            self._reducer = self.zero = sharding(self.optimizer, self._as_module())
        work = Work(layout, schedule.num_microbatches, schedule.is_split)
        self.scope = self._scope()
        """In which each block and readout runs forward."""
        self.segments = {index: self._build_segment(index, work, loss) for index in layout.segments[rank]}
        self.executor = Executor(
            schedule.programs[rank],
            self.segments,
            transport,
            work,
            on_last_backward=self._expect_gradients,
            on_segment_done=self._reduce,
            on_update=self._update,
            clock=clock_of(self._device) if options.record_times else None,
            guard=self.guard,
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the whole chain."""
        for kind, modules in (("blocks", self.blocks), ("readouts", self.readouts)):
            for index, module in modules.items():
                for name, parameter in module.named_parameters():
                    yield f"{kind}.{index}.{name}", parameter

    def start_step(
        self, batch: MicroBatches, shares: Shares | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Begin a step on these micro-batches; their shares follow from them unless there are replicas.

        `meanwhile` is called before the update, for which this thread may have to wait.
        """
        self._await_head()
        self._meanwhile = meanwhile
        if self.guard.may_skip:
            # Batch norm's statistics of a step that comes to nothing must not stay.
            self._kept_buffers = [buffer.clone() for buffer in self._buffers()]
        self.executor.start_step(batch, shares or Shares(batch.counts))

    def run(self) -> StepRecord | None:
        """Go on with the step; None if it waits for another rank of this process."""
        return self.executor.run()

    def evaluate(self, batch: MicroBatches) -> Iterator[dict[int, Score] | None]:
        """A forward-only pass that scores every readout of this rank, in the modes that modules are in.

        Yields None while it waits, the scores at the end. Interior readouts are early exits: free but for themselves.
        """
        self._await_head()
        own = self.layout.segments[self.rank]
        first, last = own[0], own[-1]
        receives = [Action(Op.RECEIVE_ACTIVATION, first, m) for m in range(batch.number)] if first else []
        self.transport.expect(receives)
        scores = {boundary: Score() for boundary in self.readouts}
        for microbatch in range(batch.number):
            if receives:
                while not self.transport.is_ready(receives[microbatch]):
                    yield None
                state = self.transport.receive(receives[microbatch])
            else:
                state = batch.inputs[microbatch]
            with torch.no_grad():
                for index in own:
                    segment = self.segments[index]
                    state = segment.run_blocks(microbatch, state)
                    if segment.readout is not None:
                        labels, boundary = batch.labels[microbatch], self.layout.blocks[index].stop
                        prediction = segment.predict(microbatch, state)[: len(labels)]  # the rest is padding
                        scores[boundary] = scores[boundary].add(prediction, labels, segment.loss)
            if last + 1 < self.layout.num_segments:
                self.transport.send(Action(Op.SEND_ACTIVATION, last, microbatch), state)
        yield scores

    @property
    def _device(self) -> torch.device:
        # Of any parameter: a stage may be frozen and still drop features.
        return next((p.device for _, p in self.named_parameters()), torch.device("cpu"))

    def _scope(self) -> Scope:
        device = self._device
        self.randomness.generators = list_generators(device)
        precision, begin = self._options.precision, self.randomness.begin

        def enter(block: int, microbatch: int) -> AbstractContextManager[object]:
            begin(block, microbatch)
            return precision.scope(device)

        return begin if precision.compute is None else enter

    def _build_segment(self, index: int, work: Work, loss: Loss) -> Segment:
        blocks = self.layout.blocks[index]
        is_read = index + 1 in self.layout.windows.readouts
        relays = sum(work.is_relayed(index, readout) for readout in self.layout.windows.readouts_crossing(index))
        return Segment(
            [self.blocks[block] for block in blocks],
            blocks.start,
            self.readouts[blocks.stop] if is_read else None,
            loss,
            num_uses=relays + 1,
            scope=self.scope,
            is_checkpointed=self._options.checkpoint,
            is_split=work.splits(index),
            guard=self.guard,
        )

    def _expect_gradients(self, index: int, is_read: bool) -> None:
        """A segment's last backward of this step begins: what it completes may travel before it ends."""
        if self._reducer is not None:
            segment = self.segments[index]
            self._reducer.expect(segment.parameters, segment.block_parameters if is_read else segment.parameters)

    def _reduce(self, index: int) -> None:
        """A segment's gradients of this step are complete: let them travel while other work goes on."""
        if self._reducer is not None:
            self._reducer.start(self.segments[index].parameters)

    def _update(self, record: StepRecord) -> None:
        if self._meanwhile is not None:
            self._meanwhile()
        if self._reducer is not None:
            record.travels = [*self._reducer.finish()]
        # Gradients have the factor of this step, which the decision may change for the next.
        factor = 1.0 if self.guard.scale is None else 1 / self.guard.scale.value
        decision = self.guard.decide(step=self.randomness.step + 1) if self.guard.is_on else True
        if decision is not True:
            record.is_skipped = True
            record.finding = decision or None
            self._leave_out()
        elif self.zero is not None:
            self.zero.step()
        else:
            self._step(factor)
        if self._shared_head is not None:
            self._shared_head.start()
        self.randomness.step += 1

    def _buffers(self) -> list[Tensor]:
        return [buffer for part in (*self.blocks.values(), *self.readouts.values()) for buffer in part.buffers()]

    def _leave_out(self) -> None:
        """Be as before the step."""
        for parameter in self.parameters:
            parameter.grad = None
        for buffer, kept in zip(self._buffers(), self._kept_buffers, strict=True):
            buffer.copy_(kept)

    def _step(self, factor: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        if self._options.clip_norm is not None:
            self._clip(self._options.clip_norm)
        if self.optimizer is not None:
            with gradients_as_weights(self._summed_wider):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

    def _as_module(self) -> nn.Module:
        """Blocks and readouts as one module, in which parameters have the names of `named_parameters`."""
        parts = {"blocks": self.blocks, "readouts": self.readouts}
        return nn.ModuleDict(
            {kind: nn.ModuleDict({str(i): m for i, m in part.items()}) for kind, part in parts.items()}
        )

    def _await_head(self) -> None:
        if self._shared_head is not None:
            self._shared_head.finish()

    def _clip(self, max_norm: float) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self._options.clip_scope == "stage" or self._sum_over_stages is None:
            torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
            return
        # A stage without weights takes part with a norm of zero.
        # In float32 everywhere: stages that DeepSpeed updates sum theirs so, in the same message.
        own = [gradient.float().square().sum() for gradient in gradients]
        squares = self._sum_over_stages(torch.stack(own).sum() if own else 0.0)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, squares.sqrt())


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which these modules are in evaluation mode; afterwards each part has the mode that it had.

    A user may have frozen some of them: those must not begin to move.
    """
    given = list(modules)
    whole = [*given, *(module.head for module in given if isinstance(module, Shared))]
    modes = {part: part.training for module in whole for part in module.modules()}
    for module in whole:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
