"""From measurements to a plan: Algorithm 1 for h*, then the search. It needs no model, and no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpc_dist.planner.measurements import Measurements
from mpc_dist.planner.objective import NEEDS_TIME
from mpc_dist.planner.plan import Plan
from mpc_dist.planner.pricing import CosineOf, Planner
from mpc_dist.planner.request import Request
from mpc_dist.planner.search import make_plan
from mpc_dist.planner.select import Selection, choose_horizons, refine_horizon
from mpc_dist.windows import sliding

SIMULATED_HORIZONS = 9

Report = Callable[[str, int, int], None]
"""(what is done, done, of how many): for a progress bar."""


@dataclass(frozen=True)
class Planned:
    """A plan with what it rests on."""

    plan: Plan
    selection: Selection
    memory: dict[int, float]
    """M(h) where it was measured: what one device would hold."""
    cosines: dict[int, float]
    planner: Planner
    measurements: Mapping[int, Measurements]


def choose_plan(
    measurements: Mapping[int, Measurements],
    cosine: CosineOf,
    memory: Callable[[int], float],
    request: Request,
    *,
    exact: bool = False,
    fingerprint: dict[str, Any],
    notes: tuple[str, ...] = (),
    report: Report = lambda _what, _done, _total: None,
) -> Planned:
    """Select h* by its angle and `memory`, M(h) of one device; then take the best way to train."""
    planner = Planner(measurements, cosine, request)
    num_blocks = planner.num_blocks
    seconds = None
    if request.objective in NEEDS_TIME or "." in request.objective:
        seconds = _step_seconds(planner, exact=exact, report=report)
    selection, sizes, cosines = refine_horizon(
        num_blocks,
        lambda horizon: (memory(horizon), cosine(sliding(num_blocks, horizon))),
        cost=request.build_cost(),
        objective=request.build_objective(),
        step_seconds=seconds,
        exact=exact,
    )
    num_settings = len(planner.settings(selection.horizon))
    count = iter(range(1, num_settings + 1))
    plan = make_plan(
        planner,
        selection,
        request,
        fingerprint=fingerprint,
        notes=notes,
        advance=lambda: report("pricing candidates", next(count), num_settings),
    )
    return Planned(plan, selection, sizes, cosines, planner, measurements)


def _step_seconds(planner: Planner, *, exact: bool, report: Report) -> dict[int, float]:
    """Predicted step time of every horizon: simulated at some, straight lines between them."""
    every = range(1, planner.num_blocks + 1)
    simulated = every if exact else choose_horizons(planner.num_blocks, SIMULATED_HORIZONS)
    known = []
    for number, horizon in enumerate(simulated, start=1):
        known.append(planner.step_seconds(horizon))
        report("step times of horizons", number, len(simulated))
    return {h: float(np.interp(h, simulated, known)) for h in every}
