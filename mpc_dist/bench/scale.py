"""`bench.py scale`: simulated step time for 4 to 1,024 stages."""

from collections.abc import Sequence

from mpc_dist.bench.rows import Row
from mpc_dist.bench.schedule import parse_windows
from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate


def bench_scale(stages: Sequence[int], windows: Sequence[tuple[str, bool]], num_microbatches: int) -> list[Row]:
    """Rows in units of one stage's forward; back-propagation in whole and in halves beside the horizons."""
    rows = []
    for num_stages in stages:
        costs = Costs.uniform([1.0] * num_stages)
        for name, split in windows:
            layout = lay_out(parse_windows(name, num_stages), [1] * num_stages)
            price = simulate(build_schedule(layout, num_microbatches, split=split), layout, costs)
            rows.append(
                Row.of_times(
                    [price.step_time],
                    system="simulated",
                    windows=name,
                    split=split,
                    stages=num_stages,
                    microbatches=num_microbatches,
                    extra={"in_flight": max(price.in_flight), "bubble": max(price.bubble)},
                )
            )
    return rows
