"""The search that simulates only what could win chooses what the search of everything chooses; bounds are bounds."""

import dataclasses
import math

import numpy as np
import pytest

from mpc_dist.bench.planning import time_planning
from mpc_dist.planner import pricing
from mpc_dist.planner import search as module
from mpc_dist.planner.bound import Bounds
from mpc_dist.planner.measurements import BlockCosts, Measurements, ReadoutCosts
from mpc_dist.planner.pricing import Planner
from mpc_dist.planner.request import Request
from mpc_dist.planner.search import search
from mpc_dist.windows import Windows

OBJECTIVES = ("time", "money", "O1", "O2", "memory")


def draw_planner(seed: int) -> Planner:
    """A made-up model with blocks as different as they come, on GPUs on which some of the candidates fit."""
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.integers(1, 8))
    unevenness = rng.choice([0.01, 1.0, 3.0])

    def draw(scale: float) -> float:
        return float(scale * np.exp(unevenness * rng.normal() / 2))

    blocks = tuple(
        BlockCosts(draw(1), draw(1) * (t > 0), draw(1), draw(400), draw(40) * (t > 0), draw(40), draw(100), draw(5))
        for t in range(num_blocks)
    )
    readouts = tuple(ReadoutCosts(draw(0.3), draw(20), draw(10), draw(1)) for _ in blocks)
    blocks, readouts = (
        tuple(dataclasses.replace(part, optimizer_bytes=2 * part.parameter_bytes) for part in parts)
        for parts in (blocks, readouts)
    )
    whole = Measurements(8, blocks, readouts, float(rng.choice([0.0, 0.01])), "made up")
    bytes_held = whole.weight_bytes(range(num_blocks), [num_blocks]) + whole.sweep_bytes(num_blocks)
    least = max(whole.weight_bytes([t], []) for t in range(num_blocks))
    request = Request(
        gpu_memory=max(least, bytes_held * float(rng.choice([0.3, 0.6, 1.2, 100.0]))),
        max_gpus=int(rng.integers(1, num_blocks + 1)),
        objective=str(rng.choice(OBJECTIVES)),
        cost=str(rng.choice(["ladder", "linear"])),
        epsilon=float(rng.choice([0.1, 0.4])),
        latency=float(rng.choice([0.0, 0.1, 2.0])),
        bandwidth=float(rng.choice([20.0, 1e9])),
        num_replicas=int(rng.integers(1, 3)),
    )
    exponent = float(rng.choice([0.1, 1.0]))

    def cosine(windows: Windows) -> float:
        ahead = [sum(w * s for s, w in aims) / sum(w for _, w in aims) - t for t, aims in enumerate(windows.targets)]
        most = [windows.num_blocks - t for t in range(windows.num_blocks)]
        return float((sum(ahead) / sum(most)) ** exponent)

    return Planner({m: whole.cut_into(m) for m in (1, 2, 4)}, cosine, request)


@pytest.mark.parametrize("small_search", [0, 10**9], ids=["best of all", "best of each kind"])
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_choice_is_that_of_the_full_search(first: int, small_search: int, monkeypatch):
    monkeypatch.setattr(module, "SMALL_SEARCH", small_search)
    num_pruned = num_compared = 0
    for seed in range(first, first + 10):
        planner = draw_planner(seed)
        settings = planner.settings(min(2, planner.num_blocks))
        try:
            full = search(planner, settings, full=True)
        except ValueError as error:
            with pytest.raises(ValueError, match=r"nothing fits|no choice is feasible"):
                search(planner, settings)
            assert "nothing fits" in str(error) or "no choice is feasible" in str(error)  # noqa: PT017
            continue
        steps: list[None] = []
        found = search(planner, settings, advance=lambda steps=steps: steps.append(None))
        assert found.candidates[0] == full.candidates[0], f"seed {seed}"
        assert len(steps) == len(settings)
        if small_search:
            kinds = {one.name: one for one in reversed(full.candidates)}
            assert {one.name: one for one in reversed(found.candidates)} == kinds, f"seed {seed}"
        num_pruned += found.num_pruned
        num_compared += 1
    assert num_compared
    assert num_pruned


@pytest.mark.parametrize("seed", range(100, 110))
def test_no_candidate_is_better_than_its_bounds(seed: int):
    planner = draw_planner(seed)
    bounds = Bounds(planner)
    for order, setting in enumerate(planner.settings(min(3, planner.num_blocks))):
        found = planner.price(setting)
        loose = bounds.before_partition(setting, order)
        close = bounds.with_partition(setting, loose, lambda _: True)
        if found is None:
            continue
        for bound in (loose, close):
            assert bound.value <= found.value, setting
            assert bound.step_seconds <= found.step_seconds, setting
        assert loose.step_seconds <= close.step_seconds


def test_a_function_of_the_users_is_not_bounded():
    planner = draw_planner(0)
    assert Bounds(planner).is_known
    request = Request(gpu_memory=1e9, objective="tests.planner.test_search.slowest_first")
    bounds = Bounds(Planner(planner.measurements, lambda _: 0.5, request))
    assert not bounds.is_known
    setting = planner.settings(1)[0]
    assert bounds.before_partition(setting, 0).value == -math.inf


def slowest_first(choice) -> float:
    return -choice.step_seconds


def test_what_is_not_simulated_is_counted_and_said():
    said: list[tuple[str, int, int]] = []
    found = time_planning(16, report=lambda *words: said.append(words))
    (note,) = (note for note in found.plan.notes if "not simulated" in note)
    assert int(note.split()[0].replace(",", "")) > 100
    assert not any("estimated step times" in note for note in found.plan.notes)
    done = [one for what, one, _ in said if what == "pricing candidates"]
    assert done == list(range(1, len(done) + 1))
    assert done[-1] == said[-1][2]


def test_what_is_estimated_is_said(monkeypatch):
    monkeypatch.setattr(pricing, "SIMULATED_ACTIONS", 500)
    found = time_planning(16)
    (note,) = (note for note in found.plan.notes if "estimated step times for the horizons" in note)
    assert "16:" in note
