"""What turns a state x(s) into a loss: a readout makes a prediction of it, a loss compares that with the labels.

A readout's own weights learn from their own loss only; parameter-free readouts have none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpc_dist.task import TaskKind
from mpc_dist.validation import check_whole

Loss = Callable[[Tensor, Tensor], Tensor]
"""(prediction, labels) -> scalar: the mean over the labels that count.

How many count is what micro-batches and replicas are weighed by: all but those marked `IGNORED` (or by the loss's own
`ignore_index`, and by class weights, as in torch's losses, also in a `functools.partial`), or what the loss says by a
method `count(labels)`. One that is the mean over something else is refused at start-up.
"""

_MEAN_TOLERANCE = 1e-3
"""Of a mean in float32 over any number of labels; a wrong weight is seldom so small a difference."""
IGNORED = -100
"""The label of a position that is not predicted, as everywhere in torch."""

ReadoutKind = Literal["identity", "pool", "project", "local", "shared"]
MOST_LAYERS = 4
"""Of a local head: it should stay small beside a block."""


@dataclass(frozen=True)
class ReadoutConfig:
    """How a loss is read at an interior boundary; the last boundary always has the model's own head."""

    kind: ReadoutKind = "local"
    """identity: the state is the prediction; pool: average it down to the label's dimension; project: a fixed random
    linear map to it; local: a trained head per boundary; shared: the final head, held constant."""
    norm: bool | None = None
    """local: whether a layer norm comes before the head; null: as in the model's own head."""
    depth: int = 1
    """local: layers of a head. 1 is a linear map; each more is a hidden layer before it, as wide as the state."""

    def __post_init__(self) -> None:
        check_whole("readout.depth", self.depth, minimum=1, maximum=MOST_LAYERS)
        if self.kind != "local" and (self.norm is not None or self.depth != 1):
            raise ValueError(
                f"readout.norm and readout.depth shape trained heads, but readout.kind is {self.kind}; use local, or "
                "leave them out"
            )

    def identify(self) -> dict[str, object]:
        """What decides a readout's weights; fields at their default are left out, as before they were there."""
        given = {name: getattr(self, name) for name in ("norm", "depth")}
        return {"kind": self.kind} | {
            name: value for name, value in given.items() if value != getattr(type(self), name)
        }


def features(state: Tensor) -> Tensor:
    """The state with features last: images (N, C, H, W) are averaged over space, others are as they are."""
    return state.mean(dim=(2, 3)) if state.ndim == 4 else state


class Identity(nn.Module):
    """The state itself is the prediction."""

    def forward(self, state: Tensor) -> Tensor:
        """Return the state."""
        return state


class FixedLinear(nn.Module):
    """A constant linear map of the features to the label's dimension; no weights to train.

    A constant map needs nothing of the state for its adjoint, so it holds no memory for backward.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.to(torch.get_default_device(), torch.get_default_dtype()))

    def forward(self, state: Tensor) -> Tensor:
        """Map (..., width) to (..., num_outputs)."""
        return F.linear(features(state), self.matrix)


def pool(width: int, num_outputs: int) -> FixedLinear:
    """Average pooling of the features to the label's dimension."""
    return FixedLinear(F.adaptive_avg_pool1d(torch.eye(width, device="cpu"), num_outputs).T)


def project(width: int, num_outputs: int, *, seed: int) -> FixedLinear:
    """A random projection of the features to the label's dimension, drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    # Drawn in float32 whatever the default dtype, so that a seed means one matrix.
    drawn = torch.randn(num_outputs, width, generator=generator, device="cpu", dtype=torch.float32)
    return FixedLinear(drawn / width**0.5)


class Shared(nn.Module):
    """The final head, held constant: the state learns from it, its weights do not learn from the state."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the head's weights are not registered here a second time.
        self._head = (head,)

    @property
    def head(self) -> nn.Module:
        """The final head, or this rank's copy of it."""
        return self._head[0]

    def point_to(self, head: nn.Module) -> None:
        """Read through another copy of the head from now on."""
        self._head = (head,)

    def train(self, mode: bool = True) -> "Shared":
        """Set the head's mode too, likewise."""
        self.head.train(mode)
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Shared":
        """Move or convert the head too: on most ranks nobody else owns it."""
        self.head._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, state: Tensor) -> Tensor:
        """Return the head's prediction from this state."""
        head = self.head
        constant = {name: tensor.detach() for name, tensor in (*head.named_parameters(), *head.named_buffers())}
        prediction: Tensor = torch.func.functional_call(head, constant, (state,))
        return prediction


def shape_head(head: nn.Module, *, norm: bool | None, depth: int) -> nn.Module:
    """A model's head with or without its norm and with hidden layers; one that has no linear map stays as it is.

    Heads have a `norm` and a `linear`; a norm acts on each position, so it may as well come after the pooling.
    """
    linear = getattr(head, "linear", None)
    if linear is None or (norm is None and depth == 1):
        return head
    width = linear.in_features
    layers: list[nn.Module] = []
    if norm is not None:
        head.norm = nn.Identity()
        layers += [nn.LayerNorm(width)] if norm else []
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    head.linear = nn.Sequential(*layers, linear)
    return head


class LinearHead(nn.Module):
    """A trained head: an optional layer norm, then a linear map of the features to the label's dimension."""

    def __init__(self, width: int, num_outputs: int, *, norm: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.linear = nn.Linear(width, num_outputs, bias=bias)

    def forward(self, state: Tensor) -> Tensor:
        """Return (..., num_outputs)."""
        prediction: Tensor = self.linear(self.norm(features(state)))
        return prediction


def check_loss(loss: Loss) -> None:
    """Raise unless the loss is a mean, as far as it says."""
    reduction = _setting(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(f"the loss has reduction {reduction!r}; use 'mean': micro-batches are weighed by their labels")


def check_mean(loss: Loss, prediction: Tensor, labels: Tensor) -> None:
    """Raise unless the loss of these labels is that of their halves, weighed by the labels that count in each.

    Otherwise the number of micro-batches and of replicas would change what is learnt. A loss that says by a method
    `count` what labels weigh is believed.
    """
    if getattr(loss, "count", None) is not None or len(labels) < 2:
        return
    with torch.no_grad():
        half = len(labels) // 2
        counts, losses = [], []
        for part in (slice(None), slice(half), slice(half, None)):
            counts.append(count_labels(loss, labels[part]))
            losses.append(float(read_loss(loss, prediction[part], labels[part])) if counts[-1] else 0.0)
    mean = sum(count * value for count, value in zip(counts[1:], losses[1:], strict=True)) / max(sum(counts[1:]), 1e-12)
    is_known = math.isfinite(losses[0])  # of states of zeros it need not be
    if is_known and not math.isclose(losses[0], mean, rel_tol=_MEAN_TOLERANCE, abs_tol=_MEAN_TOLERANCE):
        raise ValueError(
            f"the loss of {len(labels)} samples is {losses[0]:.6g}, but that of their halves, weighed by their labels, "
            f"{mean:.6g}: it is not the mean over the labels that are not {IGNORED}, so micro-batches would change "
            "what is learnt; give it a method count(labels) that says what it divides by"
        )


def count_labels(loss: Loss, labels: Tensor) -> float:
    """What these labels weigh: how many of them the mean is taken over."""
    own = getattr(loss, "count", None)
    if own is not None:
        return float(own(labels))
    if labels.is_floating_point() or isinstance(labels, FakeTensor):  # a fake one has no values
        return float(labels.numel())
    kept = find_valid(loss, labels)
    # No others divide by the weights of their labels.
    weights = _setting(loss, "weight", None) if is_torchs(loss) else None
    return float(kept.sum()) if weights is None else float(weights.to(labels.device)[labels[kept]].sum())


def find_valid(loss: Loss, labels: Tensor) -> Tensor:
    """Which class labels the loss does not pass over."""
    valid: Tensor = labels != _setting(loss, "ignore_index", IGNORED)
    return valid


def tells_valid(loss: Loss) -> bool:
    """Whether `find_valid` is right: a loss that counts by itself may pass over labels that it does not name."""
    return getattr(loss, "count", None) is None or hasattr(loss, "ignore_index")


def is_torchs(loss: Loss) -> bool:
    """Whether it is torch's own loss of classes."""
    whole = loss.func if isinstance(loss, partial) else loss
    return isinstance(whole, (nn.CrossEntropyLoss, nn.NLLLoss)) or whole in (F.cross_entropy, F.nll_loss)


def find_classes(loss: Loss, prediction: Tensor, labels: Tensor) -> int | None:
    """The dimension of a prediction's classes: the last, for torch's own losses the second; None if there is none."""
    dimension = 1 if is_torchs(loss) and prediction.ndim > 1 else prediction.ndim - 1
    sizes = (*prediction.shape[:dimension], *prediction.shape[dimension + 1 :])
    return None if labels.is_floating_point() or sizes != labels.shape else dimension


def _setting(loss: Loss, name: str, default: Any) -> Any:
    """What a loss was given, as a module or as a `functools.partial`."""
    return loss.keywords.get(name, default) if isinstance(loss, partial) else getattr(loss, name, default)


def read_loss(loss: Loss, prediction: Tensor, labels: Tensor) -> Tensor:
    """The loss in float32 at least, whatever the prediction's precision; some label must count."""
    value = loss(prediction.float() if prediction.itemsize < 4 else prediction, labels)
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"the loss gives {found}; it must be a scalar tensor, the mean over the batch")
    return value


def mean_squared_error(prediction: Tensor, labels: Tensor) -> Tensor:
    """The squared error averaged over batch and dimensions; the shapes must agree."""
    if prediction.shape != labels.shape:
        raise ValueError(
            f"the readout predicts shape {tuple(prediction.shape)} but the labels have {tuple(labels.shape)}; "
            "use a readout that maps to the label's dimension (pool, project or local)"
        )
    return F.mse_loss(prediction, labels)


def cross_entropy(prediction: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of logits (..., classes) against labels (...), averaged over the positions not `IGNORED`."""
    if prediction.shape[:-1] != labels.shape:
        raise ValueError(
            f"the readout predicts shape {tuple(prediction.shape)}, so labels need {tuple(prediction.shape[:-1])}, "
            f"but they have {tuple(labels.shape)}; use a readout that gives logits (pool, project, local or shared)"
        )
    return F.cross_entropy(prediction.reshape(-1, prediction.shape[-1]), labels.reshape(-1))


LOSSES: dict[TaskKind, Loss] = {
    "regression": mean_squared_error,
    "classification": cross_entropy,
    "tokens": cross_entropy,
}
