"""The plan: what was chosen, what it is predicted to do, and what it beat. It is YAML, and the trainer runs it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from mpc_dist.document import read_yaml, write_whole
from mpc_dist.plain_value import build
from mpc_dist.schedule import Costs
from mpc_dist.validation import show
from mpc_dist.windows import Windows, backprop, cumulative, expand, sliding, tumbling

WindowKind = Literal["sliding", "cumulative", "tumbling", "backprop"]
Unit = Literal["stages", "blocks"]


@dataclass(frozen=True)
class Shape:
    """Which loss each block learns from, as a configuration says it."""

    windows: WindowKind
    size: int | None = None
    unit: Unit = "stages"
    """With blocks, every boundary may carry a readout; with stages, only stage boundaries."""

    def __str__(self) -> str:
        return self.windows if self.size is None else f"{self.windows} {self.size} {self.unit}"

    @property
    def drifts(self) -> bool:
        """Whether no block answers for its own output: its gradient may be close to back-propagation's, yet errors of
        neighbouring boundaries are not damped and grow in training (docs/paper/windows)."""
        return self.windows == "sliding" and self.size != 1

    def over_units(self, count: int) -> Windows:
        """The windows over that many stages or blocks, whichever is counted."""
        size = self.size or count
        if self.windows == "backprop":
            return backprop(count)
        return {"sliding": sliding, "cumulative": cumulative, "tumbling": tumbling}[self.windows](count, size)

    def over_blocks(self, partition: tuple[int, ...]) -> Windows:
        """The windows over all blocks of this partition."""
        if self.unit == "stages":
            return expand(self.over_units(len(partition)), partition)
        return self.over_units(sum(partition))


@dataclass(frozen=True)
class Candidate:
    """A way to train, priced."""

    shape: Shape
    partition: tuple[int, ...]
    microbatches: int
    split: bool
    """Whether backwards are in two halves."""
    checkpoint: bool
    """Whether activations are computed again instead of held."""
    cap: int | None
    """The limit on micro-batches in flight that the schedule is built for; None: the builder's own."""
    in_flight: int
    """Most micro-batches in flight on any rank."""
    horizon_blocks: int
    """The furthest that any block looks ahead."""
    bytes_per_rank: tuple[float, ...]
    """Predicted: weights, gradients, optimizer state, activations held, messages."""
    step_seconds: float
    """Predicted."""
    bubble: float
    """Predicted share of the step in which the idlest rank waits."""
    quality: float
    """r^ = cos^2 of the angle to back-propagation's gradient."""
    cost: float
    value: float
    """The objective, to be minimised."""
    trial_loss: float | None = None
    """After a trial training, where there was one."""
    trial_quality: float | None = None
    """r = ln(J_h/J_0)/ln(J_T/J_0) as measured by the trial."""

    @property
    def num_gpus(self) -> int:
        """One per stage."""
        return len(self.partition)

    @property
    def name(self) -> str:
        """What tells it apart from the others."""
        marks = [*(["split"] if self.split else []), *(["checkpointed"] if self.checkpoint else [])]
        return ", ".join([str(self.shape), *marks])


@dataclass(frozen=True)
class Plan:
    """A choice that `launch/train.py --plan` runs as it is."""

    chosen: Candidate
    objective: str
    gpu_memory: float
    """M0 in bytes."""
    horizon: int
    """h* of Algorithm 1, in blocks, for the paper's sliding windows."""
    ladder_gpus: int
    """ceil(M(h*) / M0)."""
    realised: Candidate | None
    """h* on the fewest GPUs, from the ladder's count on, on which it fits rank by rank; None: not within the limit."""
    why: str
    """Why the two counts differ, or that they agree."""
    notes: tuple[str, ...]
    """Where the numbers come from, and what makes them doubtful."""
    costs: dict[str, Any]
    """What the order of actions is built for: seconds of each segment's parts, and the link."""
    fingerprint: dict[str, Any]
    """The parts of the configuration that the plan is for."""
    candidates: tuple[Candidate, ...]
    """All that were priced and fit, best first."""

    @property
    def realised_gpus(self) -> int | None:
        """How many GPUs h* really needs."""
        return None if self.realised is None else self.realised.num_gpus

    def build_costs(self) -> Costs:
        """The costs that the plan's schedule is built for."""
        return build(Costs, self.costs, "costs")

    def write(self, path: Path) -> None:
        """As YAML."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, yaml.safe_dump(_plain(asdict(self)), sort_keys=False, width=120))

    @classmethod
    def read(cls, path: Path) -> "Plan":
        """Read what `write` wrote."""
        try:
            plan = build(cls, read_yaml(path))
            plan.build_costs()
            return plan
        except OSError as error:
            raise ValueError(f"cannot read the plan {path}: {error.strerror}; make one with `mpc-dist plan`") from error
        except ValueError as error:
            raise ValueError(f"{path} is no plan of mpc_dist ({error}); make one with `mpc-dist plan`") from error

    def check_fits(self, fingerprint: dict[str, Any]) -> None:
        """Raise unless the plan was made for this configuration."""
        for name, value in self.fingerprint.items():
            if fingerprint.get(name) != value:
                raise ValueError(
                    f"the plan is for another {show(name)[1:-1]}: it was made for {show(value)}, the configuration has "
                    f"{show(fingerprint.get(name))}; plan again, or use the configuration of the plan"
                )


def _plain(value: Any) -> Any:
    """Only what YAML has: tuples as lists, numpy's numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value
