"""Cuts a batch into micro-batches, and says what each weighs in the step's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpc_dist.readout import Loss, count_labels


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step or of an evaluation, as far as a rank needs them."""

    number: int
    inputs: Sequence[Tensor] = ()
    """Empty but on the first stage."""
    labels: Sequence[Tensor] = ()
    """Empty where no loss is read. In an evaluation, a last one may be shorter than its inputs, which are padded."""
    counts: Sequence[float] = ()
    """How many labels count in each, or what the loss says that they weigh."""

    def to(self, device: torch.device) -> "MicroBatches":
        """The same on that device."""
        inputs, labels = ([part.to(device) for part in parts] for parts in (self.inputs, self.labels))
        return MicroBatches(self.number, inputs, labels, self.counts)


class Shares:
    """What the mean loss of each micro-batch weighs: its share of all labels that count in the step.

    With replicas, times their number: gradients are averaged over them. Then the loss of a step is that of one big
    batch, wherever its labels have holes.
    """

    def __init__(
        self,
        counts: Sequence[float],
        num_replicas: int = 1,
        sum_up: Callable[[Tensor], Callable[[], Any]] | None = None,
    ) -> None:
        """`sum_up` begins to sum a tensor over the replicas in place; what it returns waits for that."""
        self.counts = counts
        self._num_replicas = num_replicas
        self._total: float | Tensor = sum(counts)
        self._wait: Callable[[], Any] | None = None
        if sum_up is not None:
            self._total = torch.tensor(self._total, dtype=torch.float64)
            self._wait = sum_up(self._total)

    def of(self, microbatch: int) -> float:
        """Of a micro-batch in which labels count."""
        if self._wait is not None:
            self._wait()
            self._wait, self._total = None, float(self._total)
        return self.counts[microbatch] * self._num_replicas / float(self._total)


def cut(
    inputs: Tensor | None, labels: Tensor | None, num_microbatches: int, loss: Loss, *, size: int | None = None
) -> MicroBatches:
    """Equal parts of a batch, in order; as many as given, or, with `size`, parts of that many samples, the last padded.

    What a rank does not need may be left out.
    """
    given = [part for part in (inputs, labels) if part is not None]
    if inputs is not None and labels is not None and len(inputs) != len(labels):
        raise ValueError(f"the batch has {len(inputs)} inputs but {len(labels)} labels; give one label per input")
    if given and size is None:
        if len(given[0]) % num_microbatches or not len(given[0]):
            raise ValueError(
                f"a batch of {len(given[0])} cannot be cut into {num_microbatches} equal micro-batches; use a multiple"
            )
        size = len(given[0]) // num_microbatches
    parts = [] if labels is None or size is None else list(torch.split(labels, size))
    return MicroBatches(
        num_microbatches,
        [] if inputs is None or size is None else [_pad(part, size) for part in torch.split(inputs, size)],
        parts,
        [count_labels(loss, part) for part in parts],
    )


def _pad(part: Tensor, size: int) -> Tensor:
    """With its last sample repeated up to this size: messages have one shape."""
    missing = size - len(part)
    return part if not missing else torch.cat([part, part[-1:].expand(missing, *part.shape[1:])])
