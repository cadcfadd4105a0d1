"""When to look further ahead during training: a small horizon is good early, not late.

Windows tumble over groups of stages, and the groups double. The rule needs two observations at each decision: the
cosine of the present windows' gradient to back-propagation's, and the loss at the last boundary since the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ANGLE_SHARE = 0.8
"""Grow when the cosine has fallen to this share of the best that the present windows had."""
LEAST_GAIN = 0.01
"""Grow when the loss fell by less than this share since the last decision."""


@dataclass(frozen=True)
class Decision:
    """What was decided, and the evidence."""

    size: int
    """Stages per window from now on."""
    reason: str
    cosine: float
    loss: float


class GrowingHorizon:
    """Doubles the windows when their gradient drifts away from back-propagation's, or stops to help."""

    def __init__(self, num_stages: int) -> None:
        doubled = [1 << power for power in range(num_stages)]
        self._sizes = [*(size for size in doubled if size < num_stages), num_stages]
        self.sizes = tuple(self._sizes)
        """All that it may come to use, ascending."""
        self._best_cosine = 0.0
        self._last_loss: float | None = None

    @property
    def size(self) -> int:
        """Stages per window now."""
        return self._sizes[0]

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, and of how many stages."""
        return {
            "size": self.size,
            "num_stages": self.sizes[-1],
            "best_cosine": self._best_cosine,
            "last_loss": self._last_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; with another number of stages, by windows over at least as large a share of the model."""
        share = state["size"] / state["num_stages"]
        self._sizes = [size for size in self.sizes if size >= share * self.sizes[-1]]
        self._best_cosine, self._last_loss = state["best_cosine"], state["last_loss"]

    def decide(self, cosine: float, loss: float) -> Decision:
        """Keep or double the windows."""
        self._best_cosine = max(self._best_cosine, cosine)
        gain = None if self._last_loss is None else 1 - loss / self._last_loss
        reason = self._reason(cosine, gain) if len(self._sizes) > 1 else None
        self._last_loss = loss
        if reason is None:
            return Decision(self.size, "kept", cosine, loss)
        self._sizes = self._sizes[1:]
        self._best_cosine, self._last_loss = 0.0, None
        return Decision(self.size, reason, cosine, loss)

    def _reason(self, cosine: float, gain: float | None) -> str | None:
        if cosine < ANGLE_SHARE * self._best_cosine:
            return f"grown: the cosine fell to {cosine:.3f} from {self._best_cosine:.3f}"
        if gain is not None and gain < LEAST_GAIN:
            return f"grown: the loss fell by {gain:.2%} only since the last decision"
        return None
