"""Costs from a measured timeline, so that the simulator can be held against what ran."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from mpc_dist.schedule.action import Op
from mpc_dist.schedule.costs import Costs
from mpc_dist.schedule.simulator import Interval


def measure_costs(timelines: Sequence[Sequence[Interval]], *, latency: float = 0.0) -> Costs:
    """The median time of each segment's actions; where only whole backwards ran, their halves are taken as equal."""
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for row in timelines:
        for interval in row:
            times[interval.action.op, interval.action.segment].append(interval.end - interval.start)
    median = {key: statistics.median(values) for key, values in times.items()}
    segments = sorted({segment for op, segment in median if op is Op.FORWARD})
    if segments != list(range(len(segments))) or not segments:
        raise ValueError(f"the timeline shows forwards of segments {segments}; give those of all ranks")
    input_grads, weight_grads = [], []
    for segment in segments:
        whole = median.get((Op.BACKWARD, segment), 0.0)
        relay = median.get((Op.INPUT_HALF, segment), median.get((Op.RELAY, segment), whole / 2))
        input_grads.append(relay)
        weight_grads.append(median.get((Op.WEIGHT_HALF, segment), max(whole - relay, 0.0)))
    forwards = tuple(median[Op.FORWARD, segment] for segment in segments)
    update = median.get((Op.UPDATE, -1), 0.0)
    return Costs(forwards, tuple(input_grads), tuple(weight_grads), latency=latency, update=update)
