"""What one rank wrote into its metrics, read back as values by step.

A resumed run repeats steps: what it wrote later counts, and what was written beyond the step it resumed from does not.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """All lines of a rank as values."""
    steps: dict[int, StepMetrics] = {}
    evaluations: dict[int, Evaluation] = {}
    adaptations: dict[int, Adaptation] = {}
    timelines: dict[int, tuple[Interval, ...]] = {}
    offsets: list[float] = []
    held: dict[str, int] = {}
    elapsed = longest_gap = 0.0
    has_ended = False
    previous: float | None = None
    for line in lines:
        event, step = line["event"], line.get("step", 0)
        if event not in BEGINNINGS and previous is not None:
            gap = max(0.0, line["time"] - previous)  # a clock may be set back
            elapsed += gap
            longest_gap = max(longest_gap, gap)
        previous = line["time"]
        has_ended = event == "end"
        if event == "resume":
            for series in (steps, evaluations, adaptations, timelines):
                for later in [known for known in series if known > step]:
                    del series[later]
        elif event == "step":
            steps[step] = StepMetrics(
                step,
                elapsed,
                _by_boundary(line["losses"]),
                line["step_seconds"],
                line["samples_per_second"],
                line["bubble"],
            )
            held |= {name: line[name] for name in ("live_bytes", "rank_bytes") if name in line}
        elif event == "evaluation":
            scores = _by_boundary(line["scores"])
            exits = {boundary: Exit(score["loss"], score["accuracy"]) for boundary, score in scores.items()}
            evaluations[step] = Evaluation(step, elapsed, exits)
        elif event == "horizon":
            values = {name: line[name] for name in ("before", "size", "reason", "cosine", "loss")}
            adaptations[step] = Adaptation(step, **values)
        elif event == "timeline":
            timelines[step] = tuple(Interval(parse_action(text), start, end) for text, start, end in line["actions"])
            if timelines[step]:
                offsets.append(line["time"] - timelines[step][-1].end)
    start = next(line for line in reversed(lines) if line["event"] == "start")
    return RankSeries(
        rank=rank,
        stage=start["stage"],
        replica=start["replica"],
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations[step] for step in sorted(evaluations)),
        adaptations=tuple(adaptations[step] for step in sorted(adaptations)),
        timelines=dict(sorted(timelines.items())),
        clock_offset=statistics.median(offsets) if offsets else None,
        live_bytes=held.get("live_bytes"),
        rank_bytes=held.get("rank_bytes"),
        elapsed=elapsed,
        last_time=lines[-1]["time"],
        longest_gap=longest_gap,
        has_ended=has_ended,
    )


def _by_boundary(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(boundary): value for boundary, value in values.items()}
