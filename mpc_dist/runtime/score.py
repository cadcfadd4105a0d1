"""What an evaluation finds at a readout, summed up so that parts of a test set can be added."""

from dataclasses import dataclass

from torch import Tensor

from mpc_dist.readout import Loss, count_labels, find_classes, find_valid, read_loss, tells_valid


@dataclass(frozen=True)
class Score:
    """Loss and accuracy at one readout, over the labels that count."""

    total_loss: float = 0.0
    """The sum over the labels that count."""
    count: float = 0.0
    """How many count, or what the loss says that they weigh."""
    num_correct: int = 0
    num_labels: int = 0
    """Classes that were to be predicted; 0 for regression."""

    def add(self, prediction: Tensor, labels: Tensor, loss: Loss) -> "Score":
        """With another micro-batch."""
        count = count_labels(loss, labels)
        if not count:
            return self
        total = float(read_loss(loss, prediction, labels)) * count
        correct = num_labels = 0
        classes = find_classes(loss, prediction, labels)
        if classes is not None and tells_valid(loss):
            valid = find_valid(loss, labels)
            num_labels = int(valid.sum())
            correct = int(((prediction.argmax(classes) == labels) & valid).sum())
        return self + Score(total, count, correct, num_labels)

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.total_loss + other.total_loss,
            self.count + other.count,
            self.num_correct + other.num_correct,
            self.num_labels + other.num_labels,
        )

    @property
    def loss(self) -> float:
        """The mean over the labels that count."""
        return self.total_loss / self.count if self.count else 0.0

    @property
    def accuracy(self) -> float | None:
        """The share of right classes; None for regression, and where it is not known which labels count."""
        return self.num_correct / self.num_labels if self.num_labels else None
