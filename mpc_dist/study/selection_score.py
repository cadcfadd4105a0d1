"""Scores horizon selection and fixed methods by the measured rate of learning: Rel(a)."""

import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from mpc_dist.planner.cost import CostFunction, LadderCost, LinearCost
from mpc_dist.planner.objective import Choice, LeastCost, Objective, Trade
from mpc_dist.planner.select import refine_horizon, select_horizon
from mpc_dist.study.experiment import Records
from mpc_dist.study.horizon_curves import relative_rate

ALGORITHM, BACKPROP, FORWARD_FORWARD = "Algorithm 1", "BP", "FF"
LOCO = ("LoCo-3", "LoCo-5")
METHODS = (ALGORITHM, BACKPROP, FORWARD_FORWARD, *LOCO)
EPSILONS = (0.05, 0.1, 0.2, 0.4)
WEIGHTS = (0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Model:
    """What was measured of one model."""

    title: str
    size: str
    memory: dict[int, float]
    """Bytes by horizon."""
    cosines: dict[int, float]
    rates: dict[int, float]
    """Measured r by horizon, interpolated where `measured` lacks it."""
    measured: tuple[int, ...]
    loco: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(r, bytes) of LoCo."""

    @property
    def num_blocks(self) -> int:
        """T."""
        return len(self.memory)

    def at(self, horizon: int) -> tuple[float, float]:
        """What Algorithm 1 measures of a horizon."""
        return self.memory[horizon], self.cosines[horizon]

    def estimate_error(self) -> float:
        """Mean distance of cos^2 from r over the measured horizons below T; a diverged run counts as r = 0."""
        below = [h for h in self.measured if h < self.num_blocks]
        return statistics.mean(abs(self.cosines[h] ** 2 - max(self.rates[h], 0.0)) for h in below)


@dataclass(frozen=True)
class Score:
    """One cost, objective and parameter."""

    setting: str
    horizon: int
    """What Algorithm 1 selects from at most six horizons."""
    exact: int
    """What it selects from all of them."""
    best: int
    """The best by the measured rate."""
    rel: dict[str, float]
    """Rel by method; NaN where the method is infeasible."""


def score(model: Model) -> list[Score]:
    """Every cost, objective and parameter."""
    top = max(model.memory.values())
    costs: dict[str, CostFunction] = {"linear": LinearCost(top), "ladder": LadderCost(0.3 * top)}
    objectives: dict[str, Objective] = {
        **{f"O1, eps {epsilon:g}": LeastCost(epsilon) for epsilon in EPSILONS},
        **{f"O2, lambda {weight:g}": Trade(weight) for weight in WEIGHTS},
    }
    return [
        _score(model, cost, objective, f"{cost_name}, {name}")
        for cost_name, cost in costs.items()
        for name, objective in objectives.items()
    ]


def _score(model: Model, cost: CostFunction, objective: Objective, setting: str) -> Score:
    found, *_ = refine_horizon(model.num_blocks, model.at, cost=cost, objective=objective)
    exact = select_horizon(model.num_blocks, model.memory, model.cosines, cost=cost, objective=objective)

    def price(rate: float, memory: float, horizon: int) -> float:
        return objective(Choice(float(horizon), rate, memory, cost(memory)))

    values = {h: price(model.rates[h], model.memory[h], h) for h in model.memory}
    chosen = {ALGORITHM: values[found.horizon], BACKPROP: values[model.num_blocks], FORWARD_FORWARD: values[1]}
    # LoCo looks two coarse blocks ahead; objectives here do not look at the horizon.
    chosen |= {name: price(rate, memory, 2) for name, (rate, memory) in model.loco.items()}
    best = min(values, key=values.__getitem__)
    rel = {name: relative(value, list(values.values())) for name, value in chosen.items()}
    return Score(setting, found.horizon, exact.horizon, best, rel)


def relative(value: float, values: list[float]) -> float:
    """Rel = (O - O*) / (max O - O*) over the feasible values; NaN for an infeasible value."""
    feasible = [one for one in values if math.isfinite(one)]
    least, width = min(feasible), max(feasible) - min(feasible)
    if not math.isfinite(value):
        return math.nan
    if value == least:
        return 0.0
    return (value - least) / (width or abs(least))


def read_models(records: Records) -> list[Model]:
    """The models whose curves are among the records."""
    return [
        (_read_resnet if record.cell["model"]["name"] == "resnet_cifar" else _read_dense)(records, name)
        for name, record in records.items()
        if record.cell["kind"] == "CurveCell"
    ]


def _read_dense(records: Records, curves_name: str) -> Model:
    curves = records[curves_name]
    kind = curves.cell["model"]["name"]
    trained = [r for r in records.values() if r.cell["kind"] == "DenseCell" and r.cell["model"]["name"] == kind]
    cell, count = trained[0].cell, curves.cell["model"]["num_blocks"]
    rates: list[list[float]] = []
    for record in trained:
        finals = [math.inf if row[-1] is None else row[-1] for row in record.result["test"]]
        rates.append([relative_rate(final, finals[count - 1], record.result["test"][0][0]) for final in finals])
    means = [statistics.median(values) for values in zip(*rates, strict=True)]
    seeds = "one seed" if len(trained) == 1 else f"median of {len(trained)} seeds"
    size = f"{cell['data']['num_train']:,} samples, {cell['epochs']} epochs, {seeds}"
    every = range(1, count + 1)
    return Model(
        {"res_linear": "linear residual net", "res_mlp": "residual MLP"}[kind],
        size,
        dict(zip(every, curves.result["memory"], strict=True)),
        dict(zip(every, curves.result["cosines"], strict=True)),
        dict(zip(every, means[:count], strict=True)),
        tuple(every),
        dict(zip(LOCO, zip(means[count:], curves.result["other_memory"].values(), strict=True), strict=True)),
    )


def _read_resnet(records: Records, curves_name: str) -> Model:
    curves = records[curves_name]
    trained = [r for r in records.values() if r.cell["kind"] == "TrainingCell"]
    cell, start, count = trained[0].cell, curves.result["loss"], len(curves.result["memory"])
    finals = {
        (record.cell["windows"]["kind"], record.cell["windows"]["size"], record.cell["windows"]["unit"]): (
            record.result["train"][-1] if len(record.result["steps"]) == cell["num_evaluations"] + 1 else math.inf
        )
        for record in trained
    }
    full = finals["sliding", count, 1]
    rates = {key: relative_rate(final, full, start) for key, final in finals.items()}
    known = sorted((size, rate) for (kind, size, _), rate in rates.items() if kind == "sliding")
    every = range(1, count + 1)
    filled = np.interp(every, [h for h, _ in known], [rate for _, rate in known])
    # LoCo-3 has the larger coarse blocks.
    loco = [rates[key] for key in sorted(rates, key=lambda key: -key[2]) if key[0] == "loco"]
    return Model(
        f"ResNet-{2 * count + 2}, narrow",
        f"{cell['model']['channels']} channels, {cell['steps']} steps of {cell['batch_size']} images, one seed, "
        f"{len(known)} horizons measured",
        dict(zip(every, curves.result["memory"], strict=True)),
        dict(zip(every, curves.result["cosines"], strict=True)),
        dict(zip(every, filled.tolist(), strict=True)),
        tuple(h for h, _ in known),
        dict(zip(LOCO, zip(loco, curves.result["other_memory"].values(), strict=True), strict=True)),
    )
