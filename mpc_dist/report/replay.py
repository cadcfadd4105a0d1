"""One measured step of a run beside the same step simulated, on a time axis that starts at 0 for both."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpc_dist.report.run import Run
from mpc_dist.report.series import RankSeries
from mpc_dist.schedule import Interval, build_schedule, lay_out, simulate
from mpc_dist.schedule.calibrate import measure_costs

SAME_CLOCK = 1.0
"""Seconds by which the clocks of two ranks of one machine cannot differ: their files are written that fast."""
DRAWN_STEP = 3
"""Which simulated step is drawn: past the filling of the pipe."""
STRAGGLING = 1.25
"""A rank that is busy so many times as long as the median rank stands out."""


@dataclass(frozen=True)
class Row:
    """A rank's step: from the end of its last update to the end of its next."""

    rank: int
    start: float
    """Seconds."""
    end: float
    intervals: tuple[Interval, ...]
    """What it computed, in order."""

    @property
    def busy(self) -> float:
        """Seconds in which it computed or updated."""
        return sum(interval.end - interval.start for interval in self.intervals)

    @property
    def idle_share(self) -> float:
        """The share of the step in which it did neither: the bubble."""
        return max(0.0, 1 - self.busy / (self.end - self.start)) if self.end > self.start else 0.0

    @property
    def gaps(self) -> tuple[tuple[float, float], ...]:
        """When it was idle."""
        starts = [self.start, *(interval.end for interval in self.intervals)]
        ends = [*(interval.start for interval in self.intervals), self.end]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if end > start)


@dataclass(frozen=True)
class Replay:
    """A step as it ran and as the simulator has it, for the stages of the first replica."""

    step: int
    measured: tuple[Row, ...]
    simulated: tuple[Row, ...]
    simulated_seconds: float
    """Step time in steady state, from the median time of each kind of action."""
    lag: float
    """Seconds by which measured ranks were drawn closer together than they ran."""
    median_busy: tuple[float, ...]
    """By rank: the median over the last steps of the seconds in which it computed or updated."""

    @property
    def measured_seconds(self) -> float:
        """The step of the slowest rank."""
        return max(row.end - row.start for row in self.measured)

    @property
    def end(self) -> float:
        """Where the time axis must end."""
        return max(row.end for row in (*self.measured, *self.simulated))

    @property
    def straggler(self) -> int | None:
        """A rank that computes far longer than the others, if one does."""
        slowest = max(self.median_busy)
        is_slow = slowest > STRAGGLING * statistics.median(self.median_busy)
        return self.median_busy.index(slowest) if is_slow else None


def mean_idle_share(rows: Sequence[Row]) -> float:
    """The bubble over all ranks."""
    return statistics.fmean(row.idle_share for row in rows)


def replay(run: Run) -> Replay:
    """The median of the last steps, and the schedule that ran simulated with the measured times of its actions."""
    ranks = [one for one in run.ranks if one.replica == 0]
    changed = max((one.step for one in run.adaptations if one.size != one.before), default=0)
    common = set.intersection(*(set(one.timelines) for one in ranks)) if len(ranks) == run.num_stages else set()
    steps = sorted(step for step in common if step > changed and all(one.timelines[step] for one in ranks))
    if not steps:
        raise ValueError("the metrics hold no timeline that all ranks finished; they are written for the last steps")
    rows_by_step = {step: _measured_rows(ranks, step, run) for step in steps}
    # A step that follows an evaluation or a decision has no start to be told from it.
    plain = [step for step in steps if not _is_interrupted(ranks[0], step) and step - 1 in steps] or steps[-1:]
    ordered = sorted(plain, key=lambda step: max(row.end - row.start for row in rows_by_step[step]))
    chosen = ordered[(len(ordered) - 1) // 2]

    parallel = run.config["parallel"]
    layout = lay_out(run.windows, run.partition)
    schedule = build_schedule(
        layout,
        parallel["microbatches"],
        split=parallel["split"],
        cap=None if changed else parallel["cap"],
        costs=None if run.plan is None else run.plan.build_costs(),
    )
    costs = measure_costs([one.timelines[step] for one in ranks for step in steps])
    before, now = (
        simulate(schedule, layout, costs, num_steps=count).timeline for count in (DRAWN_STEP - 1, DRAWN_STEP)
    )
    simulated = [Row(rank, before[rank][-1].end, row[-1].end, row) for rank, row in enumerate(now)]
    seconds = simulate(schedule, layout, costs).step_time
    measured, lag = draw_close(rows_by_step[chosen])
    busy = (statistics.median(rows_by_step[step][rank].busy for step in steps) for rank in range(len(ranks)))
    return Replay(chosen, _from_zero(measured), _from_zero(draw_close(simulated)[0]), seconds, lag, tuple(busy))


def _measured_rows(ranks: Sequence[RankSeries], step: int, run: Run) -> list[Row]:
    shifts = _clock_shifts(ranks)
    rows = []
    for one in ranks:
        intervals = tuple(
            Interval(action, start + shifts[one.rank], end + shifts[one.rank])
            for action, start, end in one.timelines[step]
        )
        before = one.timelines.get(step - 1)
        start = intervals[0].start
        if before and not _is_interrupted(one, step):
            start = before[-1].end + shifts[one.rank]
        rows.append(Row(one.rank // run.num_replicas, start, intervals[-1].end, intervals))
    return rows


def _is_interrupted(rank: RankSeries, step: int) -> bool:
    """Whether something else than training happened right before the step."""
    busy = {one.step for one in rank.evaluations} | {one.step for one in rank.adaptations}
    return step - 1 in busy


def _clock_shifts(ranks: Sequence[RankSeries]) -> Mapping[int, float]:
    """What brings the ranks' clocks together: nothing on one machine, else the wall clock that all of them know."""
    offsets = {one.rank: one.clock_offset or 0.0 for one in ranks}
    is_one_machine = max(offsets.values()) - min(offsets.values()) < SAME_CLOCK
    return dict.fromkeys(offsets, 0.0) if is_one_machine else offsets


def draw_close(rows: Sequence[Row]) -> tuple[list[Row], float]:
    """The rows with no rank more than a step behind the one below it, and by how many seconds that moved the last.

    Without a barrier a fast rank may run many steps ahead; how far says nothing about the step, and would squeeze it.
    """
    moved = 0.0
    close = [rows[0]]
    for below, row in itertools.pairwise(rows):
        moved += max(0.0, (row.start - below.start) - (below.end - below.start))
        close.append(_shift(row, -moved))
    return close, moved


def _from_zero(rows: Sequence[Row]) -> tuple[Row, ...]:
    first = min(row.start for row in rows)
    return tuple(_shift(row, -first) for row in rows)


def _shift(row: Row, by: float) -> Row:
    intervals = tuple(Interval(action, start + by, end + by) for action, start, end in row.intervals)
    return Row(row.rank, row.start + by, row.end + by, intervals)
