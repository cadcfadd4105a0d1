"""Cuts a batch into micro-batches."""

from torch import Tensor


def split_batch(inputs: Tensor, labels: Tensor, num_microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    """Equal parts of a batch, in order."""
    if len(inputs) != len(labels):
        raise ValueError(f"the batch has {len(inputs)} inputs but {len(labels)} labels; give one label per input")
    if len(inputs) % num_microbatches or not len(inputs):
        raise ValueError(
            f"a batch of {len(inputs)} cannot be cut into {num_microbatches} equal micro-batches; use a multiple"
        )
    return list(inputs.chunk(num_microbatches)), list(labels.chunk(num_microbatches))
