"""What a data set asks of a model: the shapes of its inputs and outputs, and so the loss."""

from dataclasses import dataclass
from typing import Literal

TaskKind = Literal["regression", "classification", "tokens"]


@dataclass(frozen=True)
class Task:
    """The contract between a data set and a model."""

    kind: TaskKind
    """`regression`: real labels; `classification`: a class per sample; `tokens`: a class per position."""
    input_shape: tuple[int, ...]
    """Shape of one sample's input; for tokens (context,)."""
    num_outputs: int
    """Dimension of the label, number of classes, or size of the vocabulary."""
