"""The pipeline as a training loop sees it: the same call on every rank, one step at a time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.precision import gradient_bytes
from mpc_dist.profile.angle import AngleProfile, needed_readouts
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.readout import Loss, Shared
from mpc_dist.runtime import state
from mpc_dist.runtime.angle_probe import probe_angles
from mpc_dist.runtime.clock import clock_of
from mpc_dist.runtime.compiled import uncompiled
from mpc_dist.runtime.description import receive_description, send_description
from mpc_dist.runtime.executor import StepRecord
from mpc_dist.runtime.groups import add_parameters
from mpc_dist.runtime.guard import Guard
from mpc_dist.runtime.mesh import Mesh, leave
from mpc_dist.runtime.microbatch import Means, MicroBatches, Shares, cut
from mpc_dist.runtime.randomness import undisturbed
from mpc_dist.runtime.reducer import AllReduceReducer, bucket_bytes
from mpc_dist.runtime.replicas import check_agreement, with_first_buffers
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.shared_head import SharedHead, share_head
from mpc_dist.runtime.stage import OptimizerFactory, Stage, StageOptions, evaluating
from mpc_dist.runtime.transport import (
    ACTIVATIONS,
    ADJOINTS,
    Channel,
    DistributedTransport,
    Transport,
    connect_in_memory,
    manners_of,
)
from mpc_dist.runtime.zero import ZeroOptimizer, ZeroSettings, check_weights
from mpc_dist.schedule import Costs, Layout, build_schedule, lay_out, validate
from mpc_dist.windows import Windows

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class StepResult:
    """What a step gave on this rank."""

    record: StepRecord
    layout: Layout

    @cached_property
    def means(self) -> dict[int, Means]:
        """Of each boundary that this rank reads, unread: on a GPU nobody waits for them."""
        ends, record = self.layout.blocks, self.record
        return {
            ends[s - 1].stop: Means(torch.stack(values), tuple(record.counts[s])) for s, values in record.losses.items()
        }

    @cached_property
    def losses(self) -> dict[int, float]:
        """Mean loss at each boundary that this rank reads, over all labels of its replica that count.

        On a GPU, reading them waits for the step to finish.
        """
        return {boundary: means.average() for boundary, means in self.means.items()}

    @cached_property
    def count(self) -> float:
        """How many labels the losses are the mean of; 0 where none is read."""
        return max((sum(counts) for counts in self.record.counts.values()), default=0.0)


class Pipeline:
    """This rank's stage of a pipeline, connected to its neighbours.

    `build_block(t)` and `build_readout(s)` are called for this rank's own blocks and readouts only.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        *,
        build_block: Callable[[int], nn.Module],
        build_readout: Callable[[int], nn.Module],
        loss: Loss,
        optimizer: OptimizerFactory,
        num_microbatches: int = 1,
        split: bool = False,
        cap: int | None = None,
        costs: Costs | None = None,
        options: StageOptions | None = None,
        zero: ZeroSettings | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        """With `zero`, the replicas of each stage share its optimizer through DeepSpeed."""
        if zero is not None and mesh.replicas is None:
            raise ValueError(
                "ZeRO shares an optimizer among replicas, but every stage has one; use 2 or more, or no ZeRO"
            )
        if layout.num_ranks != mesh.num_stages:
            raise ValueError(
                f"the layout has {layout.num_ranks} stages but the mesh {mesh.num_stages}; make them agree"
            )
        self.mesh = mesh
        self.layout = layout
        self.schedule = build_schedule(layout, num_microbatches, split=split, cap=cap, costs=costs)
        validate(self.schedule, layout)
        self._timeout = timeout
        self._split = split
        self._cap = cap
        self._costs = costs
        self._blocks = {t: build_block(t).to(mesh.device) for t in layout.stage_blocks(mesh.stage)}
        self._readouts = {s: build_readout(s).to(mesh.device) for s in self._boundaries()}
        self._build_readout = build_readout
        self._loss = loss
        self._optimizer = optimizer
        self._options = options or StageOptions()
        self._zero = zero
        if zero is not None:
            check_weights(self.named_parameters().values())
        self._shared_head = self._share_head() if mesh.num_stages > 1 else None
        scale = None if self._options.loss_scale is None else replace(self._options.loss_scale)
        self.guard = Guard(
            self._options.on_nonfinite,
            scale,
            agree=self._take_largest if mesh.stages is not None else None,
            device=mesh.device,
        )
        if zero is not None and self.guard.may_skip:
            raise ValueError(
                "DeepSpeed shares the optimizer and updates by itself; use on_nonfinite stop, no loss scale"
            )
        self._stage: Stage | None = None
        self._microbatch_size = 0
        self._transport: DistributedTransport | None = None
        self._loaded: tuple[Tensor | None, Tensor | None, MicroBatches] | None = None
        mesh.watch.describe = self.describe

    @property
    def stage(self) -> Stage:
        """This rank's stage; there is one once a first batch has shown the shapes."""
        assert self._stage is not None, "run a step first"
        return self._stage

    @property
    def seconds_waiting(self) -> float:
        """How long this rank has waited for its neighbours so far."""
        return self._transport.seconds_waiting if self._transport is not None else 0.0

    @property
    def waiting_for(self) -> dict[int, float]:
        """How long this rank has waited for each neighbour so far, in seconds."""
        return dict(self._transport.waiting_for) if self._transport is not None else {}

    @property
    def share_of_work(self) -> float:
        """What a step of this rank should cost, as the schedule was built: by the given costs, else by blocks."""
        costs = self._costs or Costs.uniform([len(blocks) for blocks in self.layout.blocks])
        return sum(costs.of(action) for action in self.schedule.programs[self.mesh.stage])

    def describe(self) -> dict[str, Any]:
        """What this rank is doing; another thread may ask while it does it."""
        if self._stage is None:
            return {}
        sent = self._transport.sent_bytes if self._transport is not None else 0
        # To read a number off a GPU waits for it: one that is stuck would silence the thread that should say so.
        finding = self.guard.find() if self.mesh.device.type == "cpu" else None
        return {
            "step": self._stage.randomness.step + 1,
            **self._stage.executor.describe(),
            "sent_bytes": sent,
            "finding": None if finding is None else vars(finding),
        }

    def _take_largest(self, value: Tensor) -> None:
        """Put the largest of all ranks in place."""
        for group in (self.mesh.stages, self.mesh.replicas):
            if group is not None:
                with self.mesh.watch.waiting(group, "the agreement on the update"):
                    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)

    @property
    def seconds_waiting_for_head(self) -> float:
        """How long this rank has waited for the last stage's head so far; 0 unless readouts are shared."""
        return self._shared_head.seconds_waiting if self._shared_head is not None else 0.0

    @property
    def modules(self) -> dict[str, nn.Module]:
        """This rank's parts by their names in the whole chain."""
        parts = (("blocks", self._blocks), ("readouts", self._readouts))
        return {f"{kind}.{index}": module for kind, modules in parts for index, module in modules.items()}

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by their names in the whole chain."""
        return state.named_parameters(self.modules)

    def check_replicas(self) -> None:
        """Raise a ReplicaError unless all replicas of this stage hold the same weights; they call it together."""
        check_agreement(self.mesh, self.named_parameters())

    def with_saved_buffers(self) -> AbstractContextManager[None]:
        """A context with the buffers of the first replica, which stand for all in a checkpoint; then with its own."""
        return with_first_buffers(self.mesh, self._modules())

    def collect_state(self) -> dict[str, Tensor]:
        """Copies of this rank's share of all that is needed to go on later, by their names in the whole chain."""
        mesh, optimizer = self.mesh, self._stateful_optimizer
        return state.collect(
            self.modules, optimizer, stage=mesh.stage, replica=mesh.replica, num_replicas=mesh.num_replicas
        )

    def restore_state(self, saved: state.Saved, *, step: int) -> list[str]:
        """Go on from what was saved after `step`, by any layout; the names of weights that it did not have.

        Every rank calls it, after `connect`.
        """
        if self._zero is None:
            self._rebuild_readouts(saved)
        missing = state.restore(
            self.modules, self._stateful_optimizer, saved, stage=self.mesh.stage, replica=self.mesh.replica
        )
        self.stage.randomness.step = step
        if self._shared_head is not None:
            self._shared_head.start()  # the other ranks' copies are of before
        return missing

    def _rebuild_readouts(self, saved: state.Saved) -> None:
        """Build those that were in use before windows changed: they may be again, and must not be lost."""
        kept = {int(name.split(".")[1]) for name in saved.described if name.startswith("readouts.")}
        own = range(min(self._blocks) + 1, max(self._blocks) + 2)
        unused = sorted((kept & set(own)) - self._readouts.keys())
        for boundary in unused:
            with suppress(KeyError):  # it is not given any more: then no windows can use it
                self._readouts[boundary] = self._build_extra_readout(boundary)
        if unused and self.stage.optimizer is not None:
            trained = [parameter for parameter in self.named_parameters().values() if parameter.requires_grad]
            add_parameters(self.stage.optimizer, trained, self._optimizer)

    @property
    def _stateful_optimizer(self) -> state.StatefulOptimizer | None:
        """The optimizer with its state by parameter, of readouts out of use too; None without weights to train."""
        stage = self.stage
        if stage.zero is not None or stage.optimizer is None:
            return stage.zero
        named = {name: p for name, p in self.named_parameters().items() if p.requires_grad}
        return state.NamedOptimizer(stage.optimizer, named)

    @property
    def fixed_bytes(self) -> int:
        """What this rank holds whatever is in flight: weights and autocast's copies of them, gradients, optimizer
        state, buffers for messages and for gradients on their way to other replicas."""
        modules = self.modules.values()
        parameters = [p for module in modules for p in module.parameters()]
        size = sum(p.nbytes + (gradient_bytes(p) if p.requires_grad else 0) for p in parameters)
        size += sum(buffer.nbytes for module in modules for buffer in module.buffers())
        size += sum(segment.cast_bytes for segment in self.stage.segments.values())
        states = self.stage.optimizer.state.values() if self.stage.optimizer is not None else ()
        size += sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))
        if self.stage.zero is not None:
            size += self.stage.zero.master_bytes + self.stage.zero.bucket_bytes
        elif self.mesh.replicas is not None:
            size += bucket_bytes(self.stage.parameters)
        return size + (self._transport.posted_bytes if self._transport is not None else 0)

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank uses a batch's inputs."""
        return self.mesh.stage == 0

    @property
    def needs_labels(self) -> bool:
        """Whether this rank uses a batch's labels: it reads a loss."""
        return bool(self._boundaries())

    def connect(self, inputs: Tensor | None, labels: Tensor | None) -> None:
        """Learn the messages' shapes from a batch and build the stage, which the first step does otherwise."""
        self._prepare(inputs, labels)

    def step(
        self, inputs: Tensor | None, labels: Tensor | None, *, meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        """One optimizer step. Every stage of a replica gives the same batch; what a rank does not need may be None.

        Modules run in the modes that they are in. `meanwhile` is called when all but the update is under way.
        """
        batch = self._prepare(inputs, labels)
        self._loaded = None
        self.mesh.watch.phase = "training"
        with undisturbed(self.mesh.device), self._options.precision.step_scope(self.mesh.device):
            self.stage.start_step(batch, self._weigh(batch), meanwhile)
            record = self.stage.run()
        assert record is not None
        return StepResult(record, self.layout)

    def load(self, inputs: Tensor | None, labels: Tensor | None) -> None:
        """Begin to copy the batch of the next step to the device: `step` is then given the same tensors."""
        self._loaded = inputs, labels, self._cut(inputs, labels)

    def evaluate(
        self, inputs: Tensor | None, labels: Tensor | None, *, num_samples: int | None = None
    ) -> dict[int, Score]:
        """Loss and accuracy at every readout of this rank, by boundary, without training.

        Once ranks are connected, there may be any number of samples; a rank that gives neither inputs nor labels says
        how many.
        """
        num_samples = next((len(part) for part in (inputs, labels) if part is not None), num_samples)
        if not num_samples:
            raise ValueError("an evaluation needs samples, or their number on a rank that needs none of them")
        if self._stage is None and num_samples % self.schedule.num_microbatches:
            raise ValueError(
                f"{num_samples} samples are no {self.schedule.num_microbatches} equal micro-batches, from which the "
                "ranks could learn the size of messages; call connect(inputs, labels) with a batch as in training first"
            )
        number = None if self._stage is None else -(-num_samples // self._microbatch_size)
        batch = self._prepare(inputs, labels, number=number)
        casts = self._options.precision.step_scope(self.mesh.device)
        with self.mesh.watch.during("evaluation"), evaluating(self._modules()), undisturbed(self.mesh.device), casts:
            *_, scores = self.stage.evaluate(batch)
        assert scores is not None
        return scores

    def _weigh(self, batch: MicroBatches) -> Shares:
        mesh = self.mesh
        if mesh.replicas is None or not batch.counts:
            return Shares(batch.counts)

        def sum_up(count: float) -> Callable[[], Tensor]:
            total = torch.full((), count, dtype=torch.float64, device=mesh.device)
            work = dist.all_reduce(total, group=mesh.replicas, async_op=True)
            assert work is not None

            def wait() -> Tensor:
                with mesh.watch.waiting(mesh.replicas, "the replicas' number of labels"):
                    work.wait()
                return total

            return wait

        return Shares(batch.counts, mesh.num_replicas, sum_up)

    def _modules(self) -> list[nn.Module]:
        return [*self._blocks.values(), *self._readouts.values()]

    def change_windows(self, windows: Windows) -> None:
        """Train with other windows from the next step on: the pipe drains, weights and optimizer state stay.

        Readouts that have not been used before begin with their initial weights. Every rank calls it.
        """
        if self._zero is not None:
            raise ValueError("windows cannot change while DeepSpeed shares the optimizer: it takes no new parameters")
        self.mesh.watch.phase = "change of windows"
        self.close()
        before, head_before = self._stage, self._shared_head
        self._costs = None  # they were of other segments
        self._loaded = None  # other ranks may read losses
        partition = [len(self.layout.stage_blocks(rank)) for rank in range(self.layout.num_ranks)]
        self.layout = lay_out(windows, partition)
        self.schedule = build_schedule(self.layout, self.schedule.num_microbatches, split=self._split, cap=self._cap)
        validate(self.schedule, self.layout)
        for boundary in self._boundaries():
            if boundary not in self._readouts:
                self._readouts[boundary] = self._build_extra_readout(boundary)
        self._shared_head = self._share_head() if self.mesh.num_stages > 1 else None
        if head_before is not None:
            head_before.leave()  # the ranks have just met: nobody needs it any more
        if before is not None:
            self._stage = self._build_stage(before.transport, before)

    def measure_angles(
        self, batches: Sequence[tuple[Tensor | None, Tensor | None]], windows: Sequence[Windows] | None = None
    ) -> AngleProfile:
        """The angle of these windows (default: any) to back-propagation, for a model that no single rank holds.

        Every rank calls it with the same batches and gets the whole profile. Readouts that training does not use are
        built for it, with their initial weights.
        """
        parts = [self._prepare(*batch, is_probe=True) for batch in batches]
        needed = {s for readouts in needed_readouts(self.layout.blocks[-1].stop, windows) for s in readouts}
        ends = sorted(needed & set(range(min(self._blocks) + 1, max(self._blocks) + 2)))
        readouts = {s: self._readouts[s] if s in self._readouts else self._build_extra_readout(s) for s in ends}
        self.mesh.watch.phase = "angles"
        self.close()  # what was sent for training has arrived: the channels are free
        profile = probe_angles(
            self.mesh,
            self.stage.transport,
            self._blocks,
            readouts,
            self._loss,
            self.layout.blocks[-1].stop,
            parts,
            scope=self.stage.scope,
            windows=windows,
        )
        self.close()
        return profile

    def close(self) -> None:
        """Wait until the neighbours have taken what was sent."""
        if self._transport is not None:
            self._transport.close()
        if self._shared_head is not None:
            self._shared_head.finish()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the neighbours may be gone: nothing to wait for.
        if kind is None:
            self.close()
        leave(has_failed=kind is not None)

    def _prepare(
        self, inputs: Tensor | None, labels: Tensor | None, *, number: int | None = None, is_probe: bool = False
    ) -> MicroBatches:
        """This rank's part of a batch on its device, in micro-batches of a step, or in so many of a step's size."""
        if self._loaded is not None and self._loaded[0] is inputs and self._loaded[1] is labels and not is_probe:
            batch = self._loaded[2]
        else:
            batch = self._cut(inputs, labels, number=number, is_probe=is_probe)
        if self._stage is None:
            self._stage = self._connect(batch)
        return batch

    def _cut(
        self, inputs: Tensor | None, labels: Tensor | None, *, number: int | None = None, is_probe: bool = False
    ) -> MicroBatches:
        for given, is_needed, what in ((inputs, self.needs_inputs, "inputs"), (labels, self.needs_labels, "labels")):
            if given is None and is_needed:
                raise ValueError(f"stage {self.mesh.stage} needs a batch's {what}, got None; see needs_{what}")
        batch = cut(
            inputs if self.needs_inputs else None,
            labels,
            number or self.schedule.num_microbatches,
            self._loss,
            size=None if number is None else self._microbatch_size,
        )
        if not self.needs_labels and not is_probe:  # angles are measured at readouts that training may not use
            batch = replace(batch, labels=(), counts=())
        return batch.to(self.mesh.device)

    def _boundaries(self) -> list[int]:
        """Where this rank's segments end in a readout."""
        layout = self.layout
        own = layout.segments[self.mesh.stage]
        return [layout.blocks[segment].stop for segment in own if segment + 1 in layout.windows.readouts]

    def _build_extra_readout(self, boundary: int) -> nn.Module:
        readout = self._build_readout(boundary).to(self.mesh.device)
        own = [one for one in self._readouts.values() if isinstance(one, Shared)]
        if isinstance(readout, Shared) and own:
            readout.point_to(own[0].head)
        return readout

    def _share_head(self) -> SharedHead | None:
        windows, ranks = self.layout.windows, self.layout.ranks
        readers = frozenset(ranks[boundary - 1] for boundary in windows.readouts)
        shared_head = share_head(self.mesh, readers, self._readouts, self.layout.blocks[-1].stop)
        if shared_head is not None:
            shared_head.start()  # ranks may have initialised their copies differently
        return shared_head

    def _connect(self, batch: MicroBatches) -> Stage:
        """Agree on the shapes of messages by passing one micro-batch's shapes down the pipe, and build the stage."""
        mesh = self.mesh
        # Without a label that counts, a loss need not be a number.
        labels = next((part for part, count in zip(batch.labels, batch.counts, strict=True) if count), None)
        if self.needs_inputs:
            sample = batch.inputs[0]
            self._microbatch_size = len(sample)
        if mesh.num_stages == 1:
            (transport,) = connect_in_memory(1)
            stage = self._build_stage(transport)
            _check_stage(stage, sample, labels)
            return stage
        before, after = mesh.before, mesh.after
        channels: dict[tuple[str, str], Channel] = {}
        if before is not None:
            with mesh.watch.waiting(before.downward, f"the shape of rank {before.peer}'s messages"):
                shape, dtype, self._microbatch_size = receive_description(before.peer, before.downward, mesh.device)
            sample = torch.zeros(shape, dtype=dtype, device=mesh.device)
            for direction, kind, group in (
                ("receive", ACTIVATIONS, before.downward),
                ("send", ADJOINTS, before.upward),
            ):
                channels[direction, kind] = self._channel(before.peer, group, sample)
        self._transport = DistributedTransport(
            channels,
            rank=mesh.ranks_of_stages[mesh.stage],
            timeout=self._timeout,
            watch=mesh.watch,
            manners=manners_of(mesh.device),
        )
        stage = self._build_stage(self._transport)
        # A rank waits here for the one before it, but not for its compiler: that runs on all of them at once.
        with uncompiled() if self._options.compile else nullcontext():
            output = _check_stage(stage, sample, labels)
        if after is not None:
            with mesh.watch.waiting(after.downward, f"rank {after.peer} to take the shape of messages"):
                send_description(output, self._microbatch_size, after.peer, after.downward)
            for direction, kind, group in (("send", ACTIVATIONS, after.downward), ("receive", ADJOINTS, after.upward)):
                channels[direction, kind] = self._channel(after.peer, group, output)
        if self._options.compile:
            _check_stage(stage, sample, labels)
        return stage

    def _channel(self, peer: int, group: dist.ProcessGroup, state: Tensor) -> Channel:
        dtype = self._options.precision.message_type(state.dtype)
        return Channel(peer, group, state.shape, dtype, state.device, state.dtype)

    def _build_stage(self, transport: Transport, before: Stage | None = None) -> Stage:
        """This rank's stage; one that comes after another goes on with its optimizer and its place in training."""
        mesh = self.mesh
        readouts = {s: self._readouts[s] for s in self._boundaries()}

        def sum_over_stages(value: float | Tensor) -> Tensor:
            total = value if isinstance(value, Tensor) else torch.full((), value, device=mesh.device)
            with mesh.watch.waiting(mesh.stages, "the norm of all gradients"):
                dist.all_reduce(total, group=mesh.stages)
            return total

        def go_on(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            if before is None or before.optimizer is None:
                return self._optimizer(parameters)
            add_parameters(before.optimizer, parameters, self._optimizer)
            return before.optimizer

        stage = Stage(
            self.layout,
            self.schedule,
            mesh.stage,
            blocks=self._blocks,
            readouts=readouts,
            loss=self._loss,
            transport=transport,
            optimizer=go_on,
            options=self._options,
            reducer=self._build_reducer(),
            sharding=self._shard if self._zero is not None else None,
            shared_head=self._shared_head,
            sum_over_stages=sum_over_stages if mesh.stages is not None else None,
            replica=mesh.replica,
            guard=self.guard,
        )
        if before is not None:
            stage.randomness.step = before.randomness.step
        return stage

    def _build_reducer(self) -> AllReduceReducer | None:
        mesh = self.mesh
        if mesh.replicas is None:
            return None
        clock = clock_of(mesh.device) if self._options.record_times else None
        return AllReduceReducer(mesh.replicas, mesh.watch, clock)

    def _shard(self, optimizer: torch.optim.Optimizer, modules: nn.Module) -> ZeroOptimizer:
        assert self._zero is not None
        assert self.mesh.replicas is not None
        options = self._options
        return ZeroOptimizer(
            optimizer,
            modules,
            self._zero,
            group=self.mesh.replicas,
            clip_norm=options.clip_norm,
            stages=self.mesh.stages if options.clip_norm is not None and options.clip_scope == "global" else None,
        )


def _check_stage(stage: Stage, sample: Tensor, labels: Tensor | None) -> Tensor:
    """What the stage's blocks make of a micro-batch, leaving them as they were; raises if they cannot be trained."""
    modules = nn.ModuleList([*stage.blocks.values(), *stage.readouts.values()])
    with unchanged(modules):
        state = sample
        for segment in stage.segments.values():
            state = segment.check(state, labels)
    return state
