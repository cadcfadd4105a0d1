"""What a choice is ranked by. All objectives are minimised; an infeasible choice has the value infinity.

O1             C subject to r >= 1 - eps            least cost that is good enough
O2             -r + lambda * C                      a trade of quality against cost
memory         the largest h within the memory      what fits
time           step_time / r                        time to quality
money          GPUs * price * step_time / r         money to quality
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpc_dist.planner.cost import UserFunction
from mpc_dist.validation import check_real


@dataclass(frozen=True)
class Choice:
    """What an objective may look at."""

    horizon: float
    """In blocks."""
    quality: float
    """r^: the rate of loss decrease relative to back-propagation's."""
    memory: float
    """Bytes: of the whole model in one place for Algorithm 1, of the fullest rank for a realised plan."""
    cost: float
    """C(M)."""
    num_gpus: int = 1
    step_seconds: float = math.nan
    """NaN where no time is known yet."""


Objective = Callable[[Choice], float]


@dataclass(frozen=True)
class LeastCost:
    """O1 = C subject to r >= 1 - eps."""

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        check_real("eps", self.epsilon, minimum=0, maximum=1)
        if self.epsilon == 0:
            raise ValueError("eps 0 leaves only back-propagation; use 0 < eps < 1")

    def __call__(self, choice: Choice) -> float:
        """The cost, if the quality is high enough."""
        return choice.cost if choice.quality >= 1 - self.epsilon else math.inf


@dataclass(frozen=True)
class Trade:
    """O2 = -r + lambda * C."""

    weight: float = 0.1
    """lambda."""

    def __post_init__(self) -> None:
        check_real("lambda", self.weight, minimum=0)

    def __call__(self, choice: Choice) -> float:
        """The traded sum."""
        return -choice.quality + self.weight * choice.cost


@dataclass(frozen=True)
class LargestHorizon:
    """The largest horizon whose memory fits."""

    memory_limit: float

    def __post_init__(self) -> None:
        check_real("memory limit", self.memory_limit, minimum=1)

    def __call__(self, choice: Choice) -> float:
        """Minus the horizon, if it fits."""
        return -choice.horizon if choice.memory <= self.memory_limit else math.inf


class TimeToQuality:
    """Step time over quality."""

    def __call__(self, choice: Choice) -> float:
        """Seconds per unit of back-propagation's progress."""
        return _per_quality(choice.step_seconds, choice.quality)


@dataclass(frozen=True)
class MoneyToQuality:
    """GPU time over quality."""

    price: float = 1.0
    """Of one GPU per second."""

    def __post_init__(self) -> None:
        check_real("price", self.price, minimum=0)

    def __call__(self, choice: Choice) -> float:
        """Money per unit of back-propagation's progress."""
        return _per_quality(choice.num_gpus * self.price * choice.step_seconds, choice.quality)


NEEDS_TIME = ("time", "money")
NAMES = ("O1", "O2", "memory", *NEEDS_TIME)


def build_objective(
    name: str, *, epsilon: float = 0.1, weight: float = 0.1, memory_limit: float = math.inf, price: float = 1.0
) -> Objective:
    """One of `NAMES`, or a dotted path to a function of a `Choice`."""
    kinds: dict[str, Callable[[], Objective]] = {
        "O1": lambda: LeastCost(epsilon),
        "O2": lambda: Trade(weight),
        "memory": lambda: LargestHorizon(memory_limit),
        "time": TimeToQuality,
        "money": lambda: MoneyToQuality(price),
    }
    if name in kinds:
        return kinds[name]()
    if "." not in name:
        raise ValueError(f"unknown objective {name!r}; use {', '.join(NAMES)}, or the dotted path of a function")
    return UserFunction.load(name)


def find_best(choices: Sequence[Choice], objective: Objective) -> int:
    """The index of the least value, the first of equals; an infeasible objective names what would be feasible."""
    values = [objective(choice) for choice in choices]
    for choice, value in zip(choices, values, strict=True):
        if math.isnan(value):
            raise ValueError(f"the objective has no value at horizon {choice.horizon:g}: {choice}")
    best = min(range(len(values)), key=values.__getitem__, default=None)
    if best is None:
        raise ValueError("there is nothing to choose from")
    if math.isinf(values[best]) and values[best] > 0:
        raise ValueError(f"no choice is feasible; {_nearest(choices, objective)}")
    return best


def _nearest(choices: Sequence[Choice], objective: Objective) -> str:
    if isinstance(objective, LeastCost):
        quality = max(choice.quality for choice in choices)
        least_epsilon = f"{1 - quality:.4g} (it is {objective.epsilon})"
        return f"the best quality is {quality:.4g}, so eps must be at least {least_epsilon}"
    if isinstance(objective, LargestHorizon):
        least = min(choices, key=lambda choice: choice.memory)
        return (
            f"the least memory is {least.memory:.4g} bytes at horizon {least.horizon:g}, "
            f"the limit {objective.memory_limit:.4g}"
        )
    return "the objective is infinite everywhere"


def _per_quality(amount: float, quality: float) -> float:
    return amount / quality if quality > 0 else math.inf
