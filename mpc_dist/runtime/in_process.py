"""The whole pipeline in one process: every rank's stage, taking turns, with queues between them.

It runs the same programs by the same executors as the distributed pipeline, and so is its test and its debugger.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from mpc_dist.models.chain import Chain
from mpc_dist.runtime.executor import StepRecord
from mpc_dist.runtime.microbatch import MicroBatches, cut
from mpc_dist.runtime.randomness import undisturbed
from mpc_dist.runtime.score import Score
from mpc_dist.runtime.stage import OptimizerFactory, Stage, StageOptions, evaluating
from mpc_dist.runtime.transport import connect_in_memory
from mpc_dist.schedule import Layout, Schedule, validate


class InProcessPipeline:
    """All stages of a chain in this process."""

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        schedule: Schedule,
        *,
        optimizer: OptimizerFactory,
        options: StageOptions | None = None,
    ) -> None:
        validate(schedule, layout)
        self.layout = layout
        self.schedule = schedule
        self._loss = chain.loss
        self._precision = (options or StageOptions()).precision
        transports = connect_in_memory(layout.num_ranks, self._precision)
        self.stages = [
            Stage(
                layout,
                schedule,
                rank,
                blocks={block: chain.blocks[block] for block in layout.stage_blocks(rank)},
                readouts=readouts_of(chain, layout, rank),
                loss=chain.loss,
                transport=transports[rank],
                optimizer=optimizer,
                options=options or StageOptions(),
            )
            for rank in range(layout.num_ranks)
        ]

    def step(
        self, inputs: Tensor, labels: Tensor, *, contexts: Sequence[AbstractContextManager[object]] | None = None
    ) -> list[StepRecord]:
        """One optimizer step on a batch; a record per rank. Each rank's work runs in its context, if there are any."""
        batch = cut(inputs, labels, self.schedule.num_microbatches, self._loss)
        with undisturbed(inputs.device), self._precision.step_scope(inputs.device):
            return self._run(batch, contexts)

    def _run(self, batch: MicroBatches, contexts: Sequence[AbstractContextManager[object]] | None) -> list[StepRecord]:
        for stage in self.stages:
            stage.start_step(batch)
        records: dict[int, StepRecord] = {}
        while len(records) < len(self.stages):
            before = len(records)
            progressed = False
            for rank, stage in enumerate(self.stages):
                if rank not in records:
                    place = stage.executor.place
                    with nullcontext() if contexts is None else contexts[rank]:
                        record = stage.run()
                    progressed |= stage.executor.place != place
                    if record is not None:
                        records[rank] = record
            assert progressed or len(records) > before, "the stages wait for each other"
        return [records[rank] for rank in range(len(self.stages))]

    def evaluate(self, inputs: Tensor, labels: Tensor) -> dict[int, Score]:
        """Loss and accuracy at every readout, by boundary."""
        batch = cut(inputs, labels, self.schedule.num_microbatches, self._loss)
        modules = [part for stage in self.stages for part in (*stage.blocks.values(), *stage.readouts.values())]
        scores: dict[int, Score] = {}
        waiting: list[Iterator[dict[int, Score] | None]] = [stage.evaluate(batch) for stage in self.stages]
        with evaluating(modules), undisturbed(inputs.device), self._precision.step_scope(inputs.device):
            while waiting:
                still = []
                for passing in waiting:
                    found = next(passing)
                    if found is None:
                        still.append(passing)
                    else:
                        scores |= found
                waiting = still
        return dict(sorted(scores.items()))


def readouts_of(chain: Chain, layout: Layout, rank: int) -> dict[int, nn.Module]:
    """The readouts of a chain that a rank's segments end in, by boundary."""
    boundaries = [
        layout.blocks[segment].stop for segment in layout.segments[rank] if segment + 1 in layout.windows.readouts
    ]
    return {boundary: chain.readouts[str(boundary)] for boundary in boundaries}
