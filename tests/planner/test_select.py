"""Algorithm 1: on curves that satisfy its assumptions it finds the optimum, and it says when they do not."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpc_dist.planner.cost import LadderCost, LinearCost, UserFunction, build_cost
from mpc_dist.planner.objective import Choice, LargestHorizon, LeastCost, Trade, build_objective, find_best
from mpc_dist.planner.select import choose_horizons, fit_polynomial, refine_horizon, select_horizon


def curves(T: int, slope: float, intercept: float, cubic: tuple[float, float, float]):
    """M affine in h; cos a cubic in 1 - h/T that is 1 at h = T and lies in [0, 1]."""
    memory = {h: slope * h + intercept for h in range(1, T + 1)}
    cosines = {h: 1 - sum(c * (1 - h / T) ** power for power, c in enumerate(cubic, start=1)) for h in memory}
    return memory, cosines


@given(
    T=st.integers(4, 60),
    slope=st.floats(1, 100),
    intercept=st.floats(0, 1000),
    cubic=st.tuples(st.floats(0, 0.3), st.floats(0, 0.3), st.floats(0, 0.3)),
    epsilon=st.floats(0.02, 0.9),
    weight=st.floats(0.001, 1),
    cost=st.sampled_from(["linear", "ladder"]),
    name=st.sampled_from(["O1", "O2"]),
)
def test_at_most_six_horizons_give_the_brute_force_optimum(T, slope, intercept, cubic, epsilon, weight, cost, name):
    memory, cosines = curves(T, slope, intercept, cubic)
    top = max(memory.values())
    # The paper's settings: c = 1, M0 = max M for the linear cost and 0.3 max M for the ladder.
    priced = LinearCost(top) if cost == "linear" else LadderCost(0.3 * top)
    objective = LeastCost(epsilon) if name == "O1" else Trade(weight)
    # Rounding may decide what lies on the very edge of a rung or of the constraint; neither answer would be wrong.
    assume(all(abs(cosines[h] ** 2 - (1 - epsilon)) > 1e-7 for h in memory))
    assume(all(abs(memory[h] / (0.3 * top) - round(memory[h] / (0.3 * top))) > 1e-6 for h in memory))
    exact = {h: objective(Choice(h, cosines[h] ** 2, memory[h], priced(memory[h]))) for h in memory}
    few = choose_horizons(T)
    assert len(few) <= 6
    found = select_horizon(
        T, {h: memory[h] for h in few}, {h: cosines[h] for h in few}, cost=priced, objective=objective
    )
    assert exact[found.horizon] == pytest.approx(min(exact.values()), rel=1e-7, abs=1e-9)
    assert found.memory_fit.r_squared == pytest.approx(1)
    assert not found.warnings
    refined, measured, _ = refine_horizon(T, lambda h: (memory[h], cosines[h]), cost=priced, objective=objective)
    assert len(measured) <= 6
    assert exact[refined.horizon] == pytest.approx(min(exact.values()), rel=1e-7, abs=1e-9)


@given(T=st.integers(5, 400), k=st.floats(0.1, 1.0), share=st.floats(0.01, 0.9))
def test_the_closed_form_of_o2(T, k, share):
    """With r = 1 - k (1 - h/T)^3 and C = a h: h* = T (1 - sqrt(a lambda T / (3 k))); the T stands under the root."""
    a = 2.0
    weight = share * 3 * k / (a * T)
    objective, cost = Trade(weight), LinearCost(1.0, price=1.0)
    choices = [Choice(h, 1 - k * (1 - h / T) ** 3, a * h, cost(a * h)) for h in range(1, T + 1)]
    best = find_best(choices, objective) + 1
    continuous = T * (1 - math.sqrt(a * weight * T / (3 * k)))
    assert abs(best - max(1, min(T, continuous))) <= 1


def test_the_subset_has_both_ends_and_is_denser_there():
    assert choose_horizons(4) == (1, 2, 3, 4)
    found = choose_horizons(48)
    assert (found[0], found[-1], len(found)) == (1, 48, 6)
    gaps = np.diff(found)
    assert gaps[0] < gaps[len(gaps) // 2] > gaps[-1]


def test_a_poor_fit_is_said_and_clamped():
    T = 20
    cosines = {h: 0.0 if h < 12 else 1.0 for h in choose_horizons(T)}
    memory = {h: float(h**3) for h in cosines}
    found = select_horizon(T, memory, cosines, cost=LinearCost(1e3), objective=Trade(0.1))
    said = " ".join(found.warnings)
    assert "memory's line fits poorly" in said
    assert "the cosine's cubic misses a measured point" in said
    assert all(0 <= choice.quality <= 1 for choice in found.choices)
    exact = select_horizon(
        T,
        {h: float(h**3) for h in range(1, T + 1)},
        {h: 0.0 if h < 12 else 1.0 for h in range(1, T + 1)},
        cost=LinearCost(1e3),
        objective=LeastCost(0.1),
    )
    assert (exact.horizon, exact.warnings) == (12, ())


def test_horizons_are_measured_where_they_matter():
    """A step that no cubic follows: the answer is measured before it is given."""
    T = 40
    asked = []

    def measure(h: int) -> tuple[float, float]:
        asked.append(h)
        return float(h), 0.3 if h < 30 else 0.99

    found, memory, cosines = refine_horizon(T, measure, cost=LinearCost(T), objective=LeastCost(0.1))
    assert asked[:5] == [1, 7, 20, 34, 40]
    assert found.horizon in memory
    assert cosines[found.horizon] == 0.99
    assert len(asked) == len(set(asked)) <= 6
    exact, memory, _ = refine_horizon(T, measure, cost=LinearCost(T), objective=LeastCost(0.1), exact=True)
    assert (exact.horizon, len(memory)) == (30, T)


def test_costs_and_the_ladder_counts_whole_gpus():
    assert LinearCost(10.0, 2.0)(25) == 5
    assert [LadderCost(10.0)(size) for size in (1, 10, 10.1, 30)] == [1, 1, 2, 3]
    assert build_cost("math.sqrt", unit_bytes=1)(16) == 4


def test_objectives_say_what_would_be_feasible():
    choices = [Choice(h, quality, memory=100.0 * h, cost=h) for h, quality in ((1, 0.3), (2, 0.6))]
    with pytest.raises(ValueError, match=r"best quality is 0\.6, so eps must be at least 0\.4 \(it is 0\.1\)"):
        find_best(choices, LeastCost(0.1))
    with pytest.raises(ValueError, match="least memory is 100 bytes at horizon 1"):
        find_best(choices, LargestHorizon(50))
    assert choices[find_best(choices, LargestHorizon(150))].horizon == 1
    assert choices[find_best(choices, LeastCost(0.5))].horizon == 2
    timed = [Choice(1, 0.5, 1, 1, 4, 1.0), Choice(2, 0.9, 1, 1, 2, 1.5)]
    assert [build_objective("time")(one) for one in timed] == pytest.approx([2, 1.5 / 0.9])
    assert [build_objective("money", price=3)(one) for one in timed] == pytest.approx([24, 10])


def raises(memory):
    raise ZeroDivisionError("no GPU today")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: LeastCost(1.0), "eps 1.0 is out of range; use 0 <= eps < 1"),
        (lambda: LeastCost(0), "use 0 < eps < 1"),
        (lambda: LeastCost(-0.1), "eps -0.1 is out of range"),
        (lambda: LadderCost(0), "memory of one GPU"),
        (lambda: build_objective("O3"), "unknown objective 'O3'; use O1, O2, memory, time, money"),
        (lambda: UserFunction.load("nowhere.at_all"), "cannot import 'nowhere.at_all'"),
        (lambda: UserFunction.load("math.pi"), "is a float, not a function"),
        (lambda: UserFunction("mine", raises)(1.0), "mine raised ZeroDivisionError: no GPU today"),
        (lambda: UserFunction("mine", lambda _: math.nan)(1.0), "mine gave NaN"),
        (lambda: fit_polynomial({}, 1), "the profile is empty"),
        (lambda: fit_polynomial({1: 1.0, 2: math.nan}, 1), r"no finite value at horizons \[2\]"),
        (
            lambda: select_horizon(3, {1: 1.0}, {2: 1.0}, cost=LinearCost(1), objective=Trade()),
            "give the same",
        ),
    ],
)
def test_bad_input_is_named(action, message):
    with pytest.raises(ValueError, match=message):
        action()
