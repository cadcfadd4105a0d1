"""What ways to train came to: quality over the steps, and for each number of micro-batches a step's time and bytes.

Times are in units of an average stage's forward of the whole batch.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpc_dist.study.cell import Result
from mpc_dist.study.price_cell import interpolate

TARGET_AT = 0.8
"""The target is the test loss that back-propagation has after this share of its steps."""
TAIL = 0.25
"""Quality is averaged over the evaluations of this last share of the steps."""


@dataclass(frozen=True)
class Learnt:
    """How a way to train learnt, over its seeds."""

    rate: float
    steps: tuple[int, ...]
    """At which it was evaluated."""
    curves: tuple[tuple[float, ...], ...]
    """Test losses of each seed; infinite from where a run broke off."""
    accuracies: tuple[float, ...] = ()
    """Of each seed, over the last evaluations; empty if there is none."""

    @classmethod
    def of(cls, result: Result) -> "Learnt":
        """From what a tuned cell gave."""
        runs = result["runs"]
        steps = max((run["steps"] for run in runs), key=len)
        curves = [tuple(map(_or_infinite, run["test"])) for run in runs]
        curves = [curve + (math.inf,) * (len(steps) - len(curve)) for curve in curves]
        accuracies = [statistics.fmean(_tail(run["accuracy"])) for run in runs if "accuracy" in run]
        return cls(result["rate"], tuple(steps), tuple(curves), tuple(accuracies))

    @property
    def losses(self) -> tuple[float, ...]:
        """Of each seed, over the last evaluations."""
        return tuple(statistics.fmean(_tail(curve)) for curve in self.curves)

    @property
    def loss(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 for one."""
        finite = all(map(math.isfinite, self.losses))
        return statistics.stdev(self.losses) if len(self.losses) > 1 and finite else 0.0

    @property
    def accuracy(self) -> float | None:
        """The mean over seeds."""
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def best_so_far(self) -> list[float]:
        """The seeds' mean test loss, the lowest up to each evaluation."""
        return _lowest_so_far([statistics.fmean(values) for values in zip(*self.curves, strict=True)])

    def loss_at(self, share: float) -> float:
        """The lowest mean test loss up to that share of the steps."""
        last = max(index for index, step in enumerate(self.steps) if step <= share * self.steps[-1])
        return self.best_so_far[last]

    @property
    def quarters(self) -> dict[int, float]:
        """The mean test loss in each quarter of the steps, 1 to 4, that has an evaluation."""
        found: dict[int, list[float]] = {}
        for step, *losses in zip(self.steps, *self.curves, strict=True):
            if step:
                found.setdefault(math.ceil(4 * step / self.steps[-1]), []).extend(losses)
        return {quarter: statistics.fmean(losses) for quarter, losses in found.items()}

    def steps_to(self, target: float) -> float | None:
        """Steps until the seeds' mean test loss is as low, on straight lines between evaluations; None: never."""
        return self._cross(self.best_so_far, target)

    def seed_steps_to(self, target: float) -> tuple[float | None, ...]:
        """The same of each seed alone."""
        return tuple(self._cross(_lowest_so_far(curve), target) for curve in self.curves)

    def _cross(self, best: Sequence[float], target: float) -> float | None:
        for index, loss in enumerate(best):
            if loss <= target:
                before = best[index - 1] if index else loss
                if index == 0 or not math.isfinite(before):
                    return float(self.steps[index])
                share = (before - target) / (before - loss)
                return self.steps[index - 1] + share * (self.steps[index] - self.steps[index - 1])
        return None


def _lowest_so_far(losses: Sequence[float]) -> list[float]:
    return [min(losses[: index + 1]) for index in range(len(losses))]


def _or_infinite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _tail(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, math.ceil(TAIL * (len(values) - 1))) :]


@dataclass(frozen=True)
class Step:
    """One step with a number of micro-batches."""

    time: float
    live_bytes: float
    """Held for backward by the fullest rank."""
    rank_bytes: float
    """With weights, gradients, optimizer state and messages."""


def read_steps(result: Result, *, overhead: float, unit: float) -> dict[int, Step]:
    """From what a price cell gave, by number of micro-batches."""
    return {
        int(m): Step(interpolate(one, result["overheads"], overhead) / unit, one["live_bytes"], one["rank_bytes"])
        for m, one in result["prices"].items()
    }


@dataclass(frozen=True)
class Outcome:
    """One system on one problem."""

    system: str
    learnt: Learnt
    is_backprop: bool
    steps: dict[int, Step]
    """By number of micro-batches; of the adaptive horizon, the mean over its steps and the most bytes."""
    steps_to_target: float | None
    times: dict[int, float]
    """To the target, by number of micro-batches; empty if it was not reached."""
    seed_times: dict[int, tuple[float, ...]]
    """The same of each seed alone; infinite if it was not reached."""


def fixed_outcome(system: str, learnt: Learnt, steps: dict[int, Step], *, target: float, is_backprop: bool) -> Outcome:
    """The outcome of a system whose steps are all alike."""
    needed = learnt.steps_to(target)
    times = {} if needed is None else {m: needed * step.time for m, step in steps.items()}
    alone = [math.inf if steps is None else steps for steps in learnt.seed_steps_to(target)]
    seed_times = {m: tuple(own * step.time for own in alone) for m, step in steps.items()}
    return Outcome(system, learnt, is_backprop, steps, needed, times, seed_times)


def adaptive_outcome(
    system: str, result: Result, by_size: Mapping[int, dict[int, Step]], *, every: int, target: float
) -> Outcome:
    """The outcome of windows that grow: each step takes the time of its size, each decision a step of the largest.

    The probe of a decision runs forward and back through all stages, as a step of back-propagation does.
    """
    learnt = Learnt.of(result)
    needed = learnt.steps_to(target)
    largest, last = by_size[max(by_size)], learnt.steps[-1]
    steps, times, seed_times = {}, {}, {}
    for m in largest:
        spent = [_spend(run["sizes"], by_size, m, last) for run in result["runs"]]
        probes = (last - 1) // every * largest[m].time
        sizes = {size for run in result["runs"] for _, size, _ in run["sizes"]}
        fullest = max((by_size[size][m] for size in sizes), key=lambda step: step.live_bytes)
        steps[m] = replace(fullest, time=(statistics.fmean(spent) + probes) / last)
        if needed is not None:
            until = statistics.fmean(_spend(run["sizes"], by_size, m, needed) for run in result["runs"])
            times[m] = until + needed // every * largest[m].time
        seed_times[m] = tuple(
            math.inf if own is None else _spend(run["sizes"], by_size, m, own) + own // every * largest[m].time
            for run, own in zip(result["runs"], learnt.seed_steps_to(target), strict=True)
        )
    return Outcome(system, learnt, False, steps, needed, times, seed_times)


def _spend(
    sizes: Sequence[Sequence[int]], by_size: Mapping[int, dict[int, Step]], num_microbatches: int, until: float
) -> float:
    """The time of the steps before `until`, without probes."""
    starts = [min(float(start), until) for start, _, _ in sizes] + [until]
    return sum(
        (end - start) * by_size[size][num_microbatches].time
        for start, end, (_, size, _) in zip(starts, starts[1:], sizes, strict=False)
    )


@dataclass(frozen=True)
class Choice:
    """A system that reaches the target, with a number of micro-batches."""

    outcome: Outcome
    num_microbatches: int

    @property
    def time(self) -> float:
        """To the target."""
        return self.outcome.times[self.num_microbatches]

    @property
    def seed_times(self) -> tuple[float, ...]:
        """To the target, of each seed."""
        return self.outcome.seed_times[self.num_microbatches]

    @property
    def live_bytes(self) -> float:
        """Of the fullest rank."""
        return self.outcome.steps[self.num_microbatches].live_bytes


@dataclass(frozen=True)
class Win:
    """The fastest choice from some memory on."""

    from_bytes: float
    choice: Choice
    rival: Choice | None
    """The fastest back-propagation in the same memory; None if none fits."""


def find_wins(outcomes: Sequence[Outcome], microbatches: Sequence[int]) -> list[Win]:
    """The winners as a rank's memory grows, smallest first; each holds from its bytes up to the next one's."""
    choices = [Choice(one, m) for one in outcomes for m in microbatches if m in one.times]
    wins: list[Win] = []
    for limit in sorted({one.live_bytes for one in choices}):
        fitting = [one for one in choices if one.live_bytes <= limit]
        winner = min(fitting, key=lambda one: one.time)
        rival = min((one for one in fitting if one.outcome.is_backprop), key=lambda one: one.time, default=None)
        if not wins or (wins[-1].choice, wins[-1].rival) != (winner, rival):
            wins.append(Win(limit, winner, rival))
    return wins


@dataclass(frozen=True)
class Panel:
    """All systems on one problem."""

    problem: str
    title: str
    target: float
    """Test loss."""
    outcomes: tuple[Outcome, ...]
    """Back-propagation under each schedule first: plain, checkpointed, then the others."""
    cell: dict[str, Any]
    """How back-propagation was trained; but for windows, all others too."""
    price: dict[str, Any]
    """How 1F1B was priced."""
    readout_share: float
    """Cost of reading a loss, as a share of an average stage's forward."""

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Numbers of micro-batches, ascending."""
        return tuple(sorted(self.outcomes[0].steps))

    @property
    def backprop(self) -> Outcome:
        """Back-propagation, plain."""
        return self.outcomes[0]

    @property
    def windows(self) -> tuple[Outcome, ...]:
        """All but back-propagation."""
        return tuple(one for one in self.outcomes if not one.is_backprop)

    @property
    def best_window(self) -> Outcome:
        """The window map with the lowest loss at the end."""
        return min(self.windows, key=lambda one: one.learnt.loss)

    def find(self, system: str) -> Outcome:
        """By its name."""
        return next(one for one in self.outcomes if one.system == system)
