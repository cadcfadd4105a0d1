"""What one rank wrote into its metrics, read back as values by step.

A resumed run repeats steps: what it wrote later counts, and what was written beyond the step it resumed from does not.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from mpc_dist.plain_value import build
from mpc_dist.schedule import Interval, parse_action

BEGINNINGS = ("start", "resume")
"""Events before which time does not count."""


class Point(NamedTuple):
    """A value of a curve."""

    step: int
    elapsed: float
    """Seconds since the run began; the pause before a resume is left out."""
    value: float


@dataclass(frozen=True)
class StepMetrics:
    """What one rank wrote of one step."""

    step: int
    elapsed: float
    losses: Mapping[int, float]
    """By boundary."""
    seconds: float
    samples_per_second: float
    bubble: float
    """The share of the step in which the rank neither computed nor updated."""


@dataclass(frozen=True)
class Exit:
    """The score of the chain cut off at a boundary, on test data."""

    loss: float
    accuracy: float | None
    """None for a regression."""


@dataclass(frozen=True)
class Evaluation:
    """One rank's readouts on test data."""

    step: int
    elapsed: float
    exits: Mapping[int, Exit]
    """By boundary."""


@dataclass(frozen=True)
class Adaptation:
    """A decision on the horizon, with its evidence."""

    step: int
    before: int
    """Stages per window before it."""
    size: int
    """Stages per window from the next step on."""
    reason: str
    cosine: float
    loss: float


@dataclass(frozen=True)
class _AnyLine:
    """What every line has."""

    event: str
    time: float
    """Wall clock."""
    step: int = 0


@dataclass(frozen=True)
class _StepLine:
    """A step as it is written."""

    losses: dict[str, float]
    step_seconds: float
    samples_per_second: float
    bubble: float
    live_bytes: int | None = None
    rank_bytes: int | None = None


@dataclass(frozen=True)
class _EvaluationLine:
    """An evaluation as it is written."""

    scores: dict[str, Exit]


@dataclass(frozen=True)
class _StartLine:
    """The beginning as it is written: a rank's place."""

    stage: int
    replica: int


Line = TypeVar("Line", _AnyLine, _StepLine, _EvaluationLine, _StartLine, Adaptation)


@dataclass(frozen=True)
class RankSeries:
    """Everything that one rank wrote, by step."""

    rank: int
    stage: int
    replica: int
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[Evaluation, ...]
    adaptations: tuple[Adaptation, ...]
    timelines: Mapping[int, tuple[Interval, ...]]
    """When each action of a step ran, by this machine's monotonic clock."""
    clock_offset: float | None
    """Wall clock minus the clock of the timelines, in seconds; None without a timeline."""
    live_bytes: int | None
    """Most bytes held for backward at once."""
    rank_bytes: int | None
    """The same with weights, gradients and optimizer state."""
    elapsed: float
    """Seconds from the first line to the last, pauses before a resume left out."""
    last_time: float
    """Wall clock of the last line."""
    longest_gap: float
    """Most seconds between two lines of one sitting."""
    has_ended: bool

    @property
    def last_step(self) -> int:
        """The last step that it wrote of; 0 if none."""
        return max([0, *(one.step for one in self.steps), *self.timelines])

    @property
    def step_seconds(self) -> float | None:
        """Median over the later half of the steps."""
        later = self.steps[len(self.steps) // 2 :]
        return statistics.median(one.seconds for one in later) if later else None


def read_rank(rank: int, lines: list[dict[str, Any]]) -> RankSeries:
    """All lines of a rank as values; raises ValueError where one is not of its type."""
    steps: dict[int, StepMetrics] = {}
    evaluations: dict[int, Evaluation] = {}
    adaptations: dict[int, Adaptation] = {}
    timelines: dict[int, tuple[Interval, ...]] = {}
    offsets: list[float] = []
    live_bytes = rank_bytes = None
    elapsed = longest_gap = 0.0
    has_ended = False
    previous: float | None = None
    for content in lines:
        line = _read(_AnyLine, content)
        step = line.step
        if line.event not in BEGINNINGS and previous is not None:
            gap = max(0.0, line.time - previous)  # a clock may be set back
            elapsed += gap
            longest_gap = max(longest_gap, gap)
        previous = line.time
        has_ended = line.event == "end"
        if line.event == "resume":
            for series in (steps, evaluations, adaptations, timelines):
                for later in [known for known in series if known > step]:
                    del series[later]
        elif line.event == "step":
            one = _read(_StepLine, content)
            losses = _by_boundary(one.losses)
            steps[step] = StepMetrics(step, elapsed, losses, one.step_seconds, one.samples_per_second, one.bubble)
            live_bytes = live_bytes if one.live_bytes is None else one.live_bytes
            rank_bytes = rank_bytes if one.rank_bytes is None else one.rank_bytes
        elif line.event == "evaluation":
            evaluations[step] = Evaluation(step, elapsed, _by_boundary(_read(_EvaluationLine, content).scores))
        elif line.event == "horizon":
            adaptations[step] = _read(Adaptation, content)
        elif line.event == "timeline":
            timelines[step] = tuple(
                Interval(parse_action(text), build(float, start), build(float, end))
                for text, start, end in content["actions"]
            )
            if timelines[step]:
                offsets.append(line.time - timelines[step][-1].end)
    start = _read(_StartLine, next(content for content in reversed(lines) if content["event"] == "start"))
    return RankSeries(
        rank=rank,
        stage=start.stage,
        replica=start.replica,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        adaptations=tuple(adaptations[step] for step in sorted(adaptations)),
        timelines=dict(sorted(timelines.items())),
        clock_offset=statistics.median(offsets) if offsets else None,
        live_bytes=live_bytes,
        rank_bytes=rank_bytes,
        elapsed=elapsed,
        last_time=lines[-1]["time"],
        longest_gap=longest_gap,
        has_ended=has_ended,
    )


def _read(kind: type[Line], content: Mapping[str, Any]) -> Line:
    """The fields of that kind; a line may have others."""
    return build(kind, {field.name: content[field.name] for field in fields(kind) if field.name in content})


def _by_boundary(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(boundary): value for boundary, value in values.items()}
