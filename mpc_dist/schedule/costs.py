"""What a segment's work costs in time and memory, and what a message costs on the link between two ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpc_dist.schedule.action import Action, Op
from mpc_dist.validation import check_real


@dataclass(frozen=True)
class Costs:
    """Costs of each segment per micro-batch; seconds, or any other unit of time used throughout."""

    forward: tuple[float, ...]
    """Forward of each segment, reading its loss included."""
    input_grad: tuple[float, ...]
    """Input gradient of each segment: a relay, or the input half of a backward."""
    weight_grad: tuple[float, ...]
    """Weight half of each segment's backward; a whole backward costs both halves."""
    latency: float = 0.0
    """Time between a send and its arrival, whatever its size."""
    bandwidth: float = math.inf
    """Bytes per unit of time on each channel; messages of one channel queue."""
    message_bytes: tuple[float, ...] = ()
    """Size of the activation that leaves each segment, and of an adjoint that comes back; empty: 0."""
    held_bytes: tuple[float, ...] = ()
    """Bytes that each segment holds for backward; empty: 1 each, so that peaks count segments."""
    passing_bytes: tuple[float, ...] = ()
    """Bytes that each segment's forward holds on top while it reads its loss; empty: 0."""
    update: float = 0.0
    """Time of the optimizer step on each rank."""
    _by_op: dict[Op, tuple[float, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "message_bytes", "held_bytes", "passing_bytes"):
            values = getattr(self, name)
            optional = name.endswith("bytes")
            if len(values) != len(self.forward) and not (optional and not values):
                raise ValueError(
                    f"costs.{name} has {len(values)} entries for {len(self.forward)} segments; give one each"
                )
            for value in values:
                check_real(f"costs.{name}", value, minimum=0)
        check_real("costs.latency", self.latency, minimum=0)
        check_real("costs.update", self.update, minimum=0)
        if not self.bandwidth > 0:
            raise ValueError(f"costs.bandwidth {self.bandwidth} must be positive; use inf for a free link")
        whole = tuple(i + w for i, w in zip(self.input_grad, self.weight_grad, strict=True))
        self._by_op.update(
            {
                Op.FORWARD: self.forward,
                Op.RELAY: self.input_grad,
                Op.INPUT_HALF: self.input_grad,
                Op.WEIGHT_HALF: self.weight_grad,
                Op.BACKWARD: whole,
            }
        )

    @classmethod
    def uniform(cls, forwards: Sequence[float], *, latency: float = 0.0) -> "Costs":
        """The usual ratio: an input gradient and a weight gradient each cost what the segment's forward costs."""
        times = tuple(map(float, forwards))
        return cls(times, times, times, latency=latency)

    def of(self, action: Action) -> float:
        """The time of a compute action or an update; messages take no time of their rank."""
        if action.op is Op.UPDATE:
            return self.update
        return self._by_op[action.op][action.segment] if action.op in self._by_op else 0.0

    def transfer(self, action: Action) -> float:
        """How long the message of a send occupies its channel."""
        if not self.message_bytes or math.isinf(self.bandwidth):
            return 0.0
        # An adjoint that leaves segment s going down has the size of the activation that entered it.
        boundary = action.segment if action.op is Op.SEND_ACTIVATION else action.segment - 1
        return self.message_bytes[boundary] / self.bandwidth

    def held(self, segment: int) -> float:
        """Bytes that the segment holds for the backward of one micro-batch."""
        return self.held_bytes[segment] if self.held_bytes else 1.0

    def passing(self, segment: int) -> float:
        """Bytes that come on top for the time of the segment's forward."""
        return self.passing_bytes[segment] if self.passing_bytes else 0.0
