"""`bench.py regret`: what choosing h* from at most six horizons costs, by the objective's own measure."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mpc_dist.bench.rows import Row
from mpc_dist.data import Batches, Cifar10Data, LinearData, TrigonometricData
from mpc_dist.models import ResLinear, ResMLP, ResNetCifar
from mpc_dist.planner.cost import CostFunction, LadderCost, LinearCost
from mpc_dist.planner.objective import LeastCost, Objective, Trade
from mpc_dist.planner.select import refine_horizon, select_horizon
from mpc_dist.profile import measure_angles, measure_memory
from mpc_dist.readout import ReadoutConfig
from mpc_dist.training.config import Config
from mpc_dist.training.planning import build_whole_chain, place
from mpc_dist.windows import sliding

NUM_BATCHES = 8
# The paper's settings: c = 1; M0 = max M for the linear cost, 0.3 max M for the ladder.
COSTS: dict[str, Callable[[float], CostFunction]] = {
    "linear": lambda top: LinearCost(top),
    "ladder": lambda top: LadderCost(0.3 * top),
}
OBJECTIVES: dict[str, Objective] = {"O1, eps 0.1": LeastCost(0.1), "O2, lambda 0.3": Trade(0.3)}


def list_models(cifar_folder: str) -> dict[str, Config]:
    """The paper's three models, the last one narrow and on a part of CIFAR-10."""
    return {
        "res_linear": Config(
            model=ResLinear(), data=LinearData(), readout=ReadoutConfig("identity"), batch_size=100, device="cpu"
        ),
        "res_mlp": Config(
            model=ResMLP(), data=TrigonometricData(), readout=ReadoutConfig("pool"), batch_size=100, device="cpu"
        ),
        "resnet62 narrow": Config(
            model=ResNetCifar(blocks_per_group=10, channels=4),
            data=Cifar10Data(folder=cifar_folder, num_train_files=1),
            readout=ReadoutConfig("pool"),
            batch_size=32,
            device="cpu",
        ),
    }


@dataclass(frozen=True)
class Curves:
    """Memory and cosine of every horizon."""

    memory: dict[int, float]
    cosines: dict[int, float]

    def at(self, horizon: int) -> tuple[float, float]:
        """Both at one horizon."""
        return self.memory[horizon], self.cosines[horizon]


def bench_regret(cifar_folder: str, *, on_progress: Callable[[], None] = lambda: None) -> list[Row]:
    """A row per model, cost and objective."""
    rows = []
    for name, config in list_models(cifar_folder).items():
        curves = measure_curves(config)
        on_progress()
        num_blocks = config.model.num_blocks
        top = max(curves.memory.values())
        for cost_name, build_cost in COSTS.items():
            for objective_name, objective in OBJECTIVES.items():
                cost = build_cost(top)
                exact = select_horizon(num_blocks, curves.memory, curves.cosines, cost=cost, objective=objective)
                found, *_ = refine_horizon(num_blocks, curves.at, cost=cost, objective=objective)
                best, value = exact.values[exact.horizon - 1], exact.values[found.horizon - 1]
                extra: dict[str, Any] = {
                    "model": name,
                    "cost": cost_name,
                    "objective": objective_name,
                    "h* of six": found.horizon,
                    "measured": ",".join(map(str, found.measured)),
                    "h* of all": exact.horizon,
                    "value": value,
                    "best": best,
                    "regret": (value - best) / abs(best),
                }
                rows.append(
                    Row.of_times(
                        [0.0], system="mpc_dist", windows="", split=False, stages=1, microbatches=1, extra=extra
                    )
                )
    return rows


def measure_curves(config: Config) -> Curves:
    """Every horizon, the cosine averaged over the batches."""
    data = config.data.load()
    chain = build_whole_chain(config, data.task)
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    samples = [place(batch, config) for batch in islice(batches, NUM_BATCHES)]
    every = range(1, config.model.num_blocks + 1)
    profile = measure_angles(chain, samples)
    memory = measure_memory(chain, *samples[0], horizons=every)
    return Curves(
        {h: float(size) for h, size in memory.items()},
        {h: profile.cosine(sliding(config.model.num_blocks, h)) for h in every},
    )
