"""What a user asks of the planner."""

from dataclasses import dataclass

from mpc_dist.planner.cost import CostFunction, build_cost
from mpc_dist.planner.objective import Objective, build_objective
from mpc_dist.validation import check_real, check_whole


@dataclass(frozen=True)
class Request:
    """What the user asks for."""

    gpu_memory: float
    """M0 in bytes."""
    max_gpus: int = 8
    objective: str = "time"
    """O1, O2, memory, time, money, or a dotted path."""
    cost: str = "ladder"
    """ladder, linear, or a dotted path."""
    epsilon: float = 0.1
    """O1's tolerance."""
    weight: float = 0.1
    """O2's lambda."""
    price: float = 1.0
    """Of one GPU: per unit of the cost, and per second for money."""
    latency: float = 1e-4
    """Of a message between ranks, in seconds."""
    bandwidth: float = 1e9
    """Of a link, in bytes per second."""
    layout: str | None = None
    """A partition by hand, e.g. 4|4|6|2."""
    num_gpus: int | None = None
    """Exactly so many; None: any number up to the limit."""
    num_replicas: int = 1
    """Of every stage: with several, ranks also hold buckets of gradients under way."""

    def __post_init__(self) -> None:
        check_real("GPU memory", self.gpu_memory, minimum=1)
        check_whole("number of GPUs:", self.max_gpus, minimum=1)
        check_whole("number of replicas:", self.num_replicas, minimum=1)
        self.build_objective()
        self.build_cost()

    def build_objective(self) -> Objective:
        """What is minimised."""
        return build_objective(
            self.objective,
            epsilon=self.epsilon,
            weight=self.weight,
            memory_limit=self.gpu_memory,
            price=self.price,
        )

    def build_cost(self) -> CostFunction:
        """What memory costs."""
        return build_cost(self.cost, unit_bytes=self.gpu_memory, price=self.price)
