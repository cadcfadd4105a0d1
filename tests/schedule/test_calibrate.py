"""Costs read off a timeline are those that made it."""

import pytest

from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate
from mpc_dist.schedule.calibrate import measure_costs
from mpc_dist.windows import backprop, sliding


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("windows", [backprop(4), sliding(4, 3)], ids=["backprop", "sliding 3"])
def test_measured_costs_give_the_same_step_time(windows, split):
    layout = lay_out(windows, [1] * 4)
    costs = Costs((1.0, 2.0, 1.5, 1.0), (1.0, 2.0, 1.5, 1.0), (1.0, 2.0, 1.5, 1.0), update=0.5)
    schedule = build_schedule(layout, 3, split=split, costs=costs)
    price = simulate(schedule, layout, costs)
    found = measure_costs(price.timeline)
    assert simulate(schedule, layout, found).step_time == pytest.approx(price.step_time)
    assert found.forward == pytest.approx(costs.forward)
    assert found.update == pytest.approx(0.5)


def test_a_timeline_of_some_ranks_only_is_refused():
    layout = lay_out(backprop(3), [1] * 3)
    price = simulate(build_schedule(layout, 2), layout, Costs.uniform([1.0] * 3))
    with pytest.raises(ValueError, match=r"forwards of segments \[1, 2\]; give those of all ranks"):
        measure_costs(price.timeline[1:])
