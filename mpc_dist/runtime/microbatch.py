"""Cuts a batch into micro-batches, and says what each weighs in the step's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        """The same on that device; to a GPU each micro-batch is copied while this thread and the device go on."""
        inputs, labels = ([_move(part, device) for part in parts] for parts in (self.inputs, self.labels))
        return MicroBatches(self.number, inputs, labels, self.counts)


def _move(part: Tensor, device: torch.device) -> Tensor:
    # From pages that may be swapped out, a copy would be waited for.
    is_far = part.device.type == "cpu" != device.type
    return part.pin_memory().to(device, non_blocking=True) if is_far else part.to(device)


class Shares:
    """What the mean loss of each micro-batch weighs: its share of all labels that count in the step.

    With replicas, times their number: gradients are averaged over them. Then the loss of a step is that of one big
    batch, wherever its labels have holes.
    """

    def __init__(
        self,
        counts: Sequence[float],
        num_replicas: int = 1,
        sum_up: Callable[[float], Callable[[], Tensor]] | None = None,
    ) -> None:
        """`sum_up` begins to sum a number over the replicas; what it returns waits for the sum and gives it."""
        self.counts = counts
        self._num_replicas = num_replicas
        own = float(sum(counts))
        self._total: float | Tensor = own
        self._wait = None if sum_up is None else sum_up(own)

    def of(self, microbatch: int) -> float | Tensor:
        """Of a micro-batch in which labels count; over replicas a float64 on their device, which nobody reads."""
        if self._wait is not None:
            self._total, self._wait = self._wait(), None
        own = self.counts[microbatch] * self._num_replicas
        # A number divided by a tensor would be multiplied by its reciprocal.
        return torch.full_like(self._total, own) / self._total if isinstance(self._total, Tensor) else own / self._total


@dataclass(frozen=True)
class Means:
    """The mean losses of a step's micro-batches, on their device."""

    values: Tensor
    counts: tuple[float, ...]
    """How many labels each is of."""

    @property
    def count(self) -> float:
        """Of all of them."""
        return sum(self.counts)

    def average(self) -> float:
        """Over all labels; on a device it waits for them."""
        if not self.count:
            return 0.0
        return float(self.values.cpu().double() @ (torch.tensor(self.counts, dtype=torch.float64) / self.count))


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
