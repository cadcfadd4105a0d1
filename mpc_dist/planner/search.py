"""Takes the best way to train of all that are worth a look, and simulates only those that could be it."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpc_dist.planner.bound import Bound, Bounds
from mpc_dist.planner.cost import LadderCost
from mpc_dist.planner.plan import Candidate, Plan, Shape
from mpc_dist.planner.pricing import SIMULATED_ACTIONS, Planner, Setting
from mpc_dist.planner.request import Request
from mpc_dist.planner.select import Selection

SMALL_SEARCH = 512
"""Blocks times GPUs up to which the best of every kind is found, and not the best of all only."""
MOST_ACTIONS = 500_000
"""Compute actions per step beyond which a schedule is not built: it would take minutes. Only wide windows have more."""
REALISED_ACTIONS = 2_000_000
"""Compute actions in all the schedules that may be built to find the fewest GPUs for h*."""

ALL = "all"
"""Every candidate whose windows do not drift."""


@dataclass(frozen=True)
class Found:
    """What a search came upon."""

    candidates: tuple[Candidate, ...]
    """Those that were simulated and fit, best first."""
    num_settings: int
    num_pruned: int
    """Settings whose bound is worse than what was found."""
    num_too_long: int
    """Settings whose schedule would be too long."""


def search(
    planner: Planner, settings: Sequence[Setting], *, advance: Callable[[], None] = lambda: None, full: bool = False
) -> Found:
    """Price settings in the order of their bounds, until no bound is better than what was found.

    The chosen one is that of the full search, which prices all. `advance` is called as often as there are settings.
    """
    bounds = Bounds(planner)
    waiting = [(setting.shape.drifts, bounds.before_partition(setting, n), False) for n, setting in enumerate(settings)]
    heapq.heapify(waiting)
    best: dict[object, Bound] = {}
    candidates: dict[int, Candidate] = {}
    num_pruned = num_too_long = 0
    while waiting:
        drifts, bound, is_close = heapq.heappop(waiting)
        setting = settings[bound.order]
        rivals = _rivals(setting, planner)

        def is_worth(bound: Bound, rivals: Sequence[object] = rivals) -> bool:
            return full or not any(rival in best and bound > best[rival] for rival in rivals)

        if bound.step_seconds == math.inf:
            pass  # it fits on no partition
        elif not is_worth(bound):
            num_pruned += 1
        elif not full and planner.num_actions(setting) > MOST_ACTIONS:
            num_too_long += 1
        elif not is_close and not full:
            heapq.heappush(waiting, (drifts, bounds.with_partition(setting, bound, is_worth), True))
            continue
        else:
            candidate = planner.price(setting)
            if candidate is not None:
                candidates[bound.order] = candidate
                reached = Bound(candidate.value, candidate.step_seconds, candidate.num_gpus, bound.order)
                # What is not feasible beats nothing: all are priced then, and the nearest is named.
                if candidate.value < math.inf:
                    for name in (*rivals, ALL) if not drifts else rivals:
                        best[name] = min(best.get(name, reached), reached)
        advance()
    ranked = planner.rank([candidates[n] for n in sorted(candidates)])
    return Found(tuple(ranked), len(settings), num_pruned, num_too_long)


def _rivals(setting: Setting, planner: Planner) -> tuple[object, ...]:
    """What a setting has to beat to be worth simulating: its own kind, and in a large search also all others.

    Back-propagation is what all are compared with, so its best is always found.
    """
    kind = (setting.shape, setting.split, setting.checkpoint)
    if planner.num_blocks * planner.most_stages <= SMALL_SEARCH or setting.shape.windows == "backprop":
        return (kind,)
    return (kind, ALL)


def make_plan(
    planner: Planner,
    selection: Selection,
    request: Request,
    *,
    fingerprint: dict[str, Any],
    notes: tuple[str, ...] = (),
    advance: Callable[[], None] = lambda: None,
) -> Plan:
    """Take the best candidate; `advance` is called after each setting, for a progress bar."""
    found = search(planner, planner.settings(selection.horizon), advance=advance)
    ranked = found.candidates
    ladder = LadderCost(request.gpu_memory).count(selection.choice.memory)
    realised, tried = _realise(planner, selection, request, ladder)
    return Plan(
        chosen=ranked[0],
        objective=request.objective,
        gpu_memory=request.gpu_memory,
        horizon=selection.horizon,
        ladder_gpus=ladder,
        realised=realised,
        why=_explain(selection, tried, ladder, realised),
        notes=(*notes, *selection.warnings, *_note_passed_over(ranked), *_note_not_simulated(found, planner.estimated)),
        costs=planner.costs_of(ranked[0]),
        fingerprint=fingerprint,
        candidates=ranked,
    )


def _note_passed_over(ranked: Sequence[Candidate]) -> Iterator[str]:
    best = min(ranked, key=lambda one: one.value)
    if best.shape.drifts and best.value < ranked[0].value:
        yield (
            f"{best.shape} has a better value by its angle ({best.value:.4g} against {ranked[0].value:.4g}), but no "
            "trial has shown that sliding windows of more than one unit learn here; --trial would"
        )


def _note_not_simulated(found: Found, estimated: Sequence[int]) -> Iterator[str]:
    if estimated:
        horizons = ", ".join(map(str, sorted(set(estimated))))
        yield (
            f"h* was chosen with estimated step times for the horizons {horizons}: a step of them has more than "
            f"{SIMULATED_ACTIONS:,} actions, and is taken to last as long as its slowest stage works"
        )
    if found.num_pruned:
        yield (
            f"{found.num_pruned:,} of {found.num_settings:,} candidates were not simulated: by a bound on what they "
            "can do, others are better"
        )
    if found.num_too_long:
        yield (
            f"{found.num_too_long:,} of {found.num_settings:,} candidates were passed over: with their wide windows a "
            f"step has more than {MOST_ACTIONS:,} actions"
        )


def _realise(planner: Planner, selection: Selection, request: Request, ladder: int) -> tuple[Candidate | None, int]:
    """h* on the fewest GPUs, from the ladder's count on, on which every rank keeps within its memory.

    And the most GPUs that were tried.
    """
    num_blocks = len(selection.choices)
    whole = selection.horizon == num_blocks
    shape = Shape("backprop") if whole else Shape("sliding", selection.horizon, "blocks")
    bounds, actions = Bounds(planner), 0
    most = min(request.max_gpus, num_blocks)
    for num_gpus in range(ladder, most + 1):
        for microbatches in planner.microbatches:
            setting = Setting(shape, num_gpus, microbatches, num_gpus > 1, False)
            if not bounds.may_fit(setting):
                continue
            actions += planner.num_actions(setting)
            if actions > REALISED_ACTIONS:
                return None, num_gpus - 1
            found = planner.price(setting)
            if found is not None:
                return found, num_gpus
    return None, most


def _explain(selection: Selection, tried: int, ladder: int, realised: Candidate | None) -> str:
    if realised is None:
        return (
            f"the ladder asks for {ladder} GPUs; no partition of h* = {selection.horizon} was found that keeps every "
            f"rank within its memory on up to {max(tried, ladder - 1)} GPUs"
        )
    if realised.num_gpus == ladder:
        return f"the ladder's {ladder} GPUs hold h* = {selection.horizon} rank by rank"
    fullest = max(range(realised.num_gpus), key=realised.bytes_per_rank.__getitem__)
    return (
        f"the ladder divides the whole memory evenly into {ladder} GPUs, but blocks do not cut evenly, windows that "
        f"cross ranks hold activations on several, and ranks hold messages: the fewest that keep within it are "
        f"{realised.num_gpus} (fullest: rank {fullest} with {realised.bytes_per_rank[fullest]:,.0f} bytes)"
    )
