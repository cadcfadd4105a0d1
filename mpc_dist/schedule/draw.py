"""Draws a timeline in text: a row per rank, a cell per unit of time."""

from collections.abc import Sequence

from mpc_dist.schedule.action import Op
from mpc_dist.schedule.simulator import Interval


def draw_timeline(timeline: Sequence[Sequence[Interval]], *, unit: float, max_columns: int = 120) -> str:
    """Each action as its letter and micro-batch, over as many cells as it takes units; dots where a rank waits.

    F forward, R relay, B backward, I input half, W weight half. A rank's row begins later the further down the pipe it
    is: no rank waits for the others before it starts its next step.
    """
    start = min((row[0].start for row in timeline if row), default=0.0)
    largest = max((interval.action.microbatch for row in timeline for interval in row), default=0)
    width = 1 + len(str(max(largest, 0)))
    lines = []
    for rank, row in enumerate(timeline):
        cells: list[str] = []
        for interval in row:
            if interval.action.op is Op.UPDATE:
                continue
            first, last = (round((time - start) / unit) for time in (interval.start, interval.end))
            cells += ["·".rjust(width)] * (first - len(cells))
            text = f"{interval.action.op.value}{interval.action.microbatch}".ljust(width)
            cells += [text if index == 0 else "─" * width for index in range(max(last - len(cells), 0))]
        shown = cells[: max_columns // (width + 1)]
        lines.append(f"{rank:>4} " + " ".join(shown) + (" …" if len(shown) < len(cells) else ""))
    return "\n".join(lines)
