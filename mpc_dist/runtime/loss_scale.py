"""The factor on the loss with which small gradients survive float16: the same on every rank, always a power of two.

Multiplying by a power of two and dividing again changes no bit of a gradient that neither overflows nor underflows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST, SMALLEST = 2.0**24, 1.0


@dataclass
class LossScale:
    """Halved when any rank overflows, doubled after many good steps; every rank tells it the same."""

    value: float = 2.0**16
    interval: int = 2000
    """Good steps in a row before it is doubled."""
    num_good: int = 0
    """Good steps since it last changed."""

    def __post_init__(self) -> None:
        if not SMALLEST <= self.value <= LARGEST or math.frexp(self.value)[0] != 0.5:
            raise ValueError(
                f"a loss scale of {self.value:g} is not a power of two from {SMALLEST:g} to {LARGEST:g}; use e.g. 65536"
            )

    @property
    def is_smallest(self) -> bool:
        """Whether an overflow can no longer be blamed on the scale."""
        return self.value == SMALLEST

    def update(self, *, has_overflowed: bool) -> None:
        """A step has been done, or was skipped since a gradient overflowed on some rank."""
        if has_overflowed:
            self.value, self.num_good = max(self.value / 2, SMALLEST), 0
            return
        self.num_good += 1
        if self.num_good == self.interval:
            self.value, self.num_good = min(self.value * 2, LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"value": self.value, "num_good": self.num_good}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.value, self.num_good = float(state["value"]), int(state["num_good"])
