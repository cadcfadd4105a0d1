"""The memory a horizon holds: M(h), the peak bytes kept for backward by the eager sweep.

On the CPU it is counted exactly, tensor by tensor as autograd saves and frees them; on CUDA it is the allocator's peak
above what was allocated before the sweep (which includes passing buffers). Weights, their gradients and the batch are
not counted: they are there whatever the horizon. Nor is a block's input that no operation saves.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from mpc_dist.gradient import sweep
from mpc_dist.models.chain import Chain
from mpc_dist.precision import FULL, Precision, is_cast
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.windows import Windows, sliding


class SavedBytes:
    """Counts the bytes that autograd holds for backward while active; each storage once, the `given` tensors' never.

    Nor those of autocast's copies of trained weights, which are held until the step ends, whatever a graph does.
    Graphs made inside the context are counted until they are freed, also after the context has ended.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.live = 0
        """Bytes held now."""
        self.peak = 0
        """The most bytes held at any time."""
        self._given = {_storage_of(tensor) for tensor in given}
        self._holders: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(tensor)
        storage = _storage_of(tensor)
        if storage not in self._given and not is_cast(tensor):
            size = tensor.untyped_storage().nbytes()
            if self._holders[storage] == 0:
                self.live += size
                self.peak = max(self.peak, self.live)
            self._holders[storage] += 1
            weakref.finalize(saved, self._release, storage, size)
        return saved

    def _release(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if self._holders[storage] == 0:
            del self._holders[storage]
            self.live -= size

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


class _Saved:
    """What autograd keeps in place of a saved tensor: it dies with the graph, and so tells when the bytes are free."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a node that saves its own output would otherwise hold itself alive through it.
        self.tensor = tensor.detach()


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_bytes(model: Chain, inputs: Tensor, labels: Tensor, windows: Windows, *, precision: Precision = FULL) -> int:
    """The most bytes that the eager sweep holds for backward at any time."""
    if inputs.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(inputs.device)
        before = torch.cuda.memory_allocated(inputs.device)
        _sweep_away(model, inputs, labels, windows, precision)
        return torch.cuda.max_memory_allocated(inputs.device) - before
    with SavedBytes([*model.parameters(), *model.buffers(), inputs, labels]) as saved:
        _sweep_away(model, inputs, labels, windows, precision)
    if saved.live:
        raise ValueError(
            f"{saved.live} bytes are still held after the sweep: a block keeps activations of its own; let it drop them"
        )
    return saved.peak


def _sweep_away(model: Chain, inputs: Tensor, labels: Tensor, windows: Windows, precision: Precision) -> None:
    """Run the eager sweep and drop the gradients as they come."""
    with precision.step_scope(inputs.device):
        for _ in sweep(model, inputs, labels, windows, precision=precision):
            pass


def measure_memory(
    model: Chain,
    inputs: Tensor,
    labels: Tensor,
    *,
    horizons: Sequence[int],
    precision: Precision = FULL,
    advance: Callable[[], None] = lambda: None,
) -> dict[int, int]:
    """M(h) in bytes for the paper's sliding windows; `advance` is called after each horizon, for a progress bar."""
    measured = {}
    with unchanged(model):
        for horizon in horizons:
            windows = sliding(model.num_blocks, horizon)
            measured[horizon] = peak_bytes(model, inputs, labels, windows, precision=precision)
            advance()
    return measured


@dataclass(frozen=True)
class LineFit:
    """y = slope * x + intercept by least squares."""

    slope: float
    intercept: float
    r_squared: float
    """1 for a perfect line; also 1 where all y are equal."""

    def at(self, x: float) -> float:
        """The line's value."""
        return self.slope * x + self.intercept


def fit_line(points: dict[int, int]) -> LineFit:
    """The line through measured points; one point gives a constant."""
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()), dtype=float)
    if len(x) == 1:
        return LineFit(0.0, float(y[0]), 1.0)
    slope, intercept = np.polyfit(x, y, 1)
    total = float(np.sum((y - y.mean()) ** 2))
    residual = float(np.sum((y - (slope * x + intercept)) ** 2))
    return LineFit(float(slope), float(intercept), 1.0 - residual / total if total else 1.0)
