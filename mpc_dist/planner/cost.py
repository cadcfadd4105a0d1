"""What memory costs: the paper's linear and ladder costs, or a function of the user's.

linear  C = c * M / M0
ladder  C = c * ceil(M / M0): M0 is the memory of one GPU, and GPUs come whole
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mpc_dist.validation import check_real

CostFunction = Callable[[float], float]
"""Bytes -> cost."""
CostKind = Literal["ladder", "linear"]

ROUNDING = 1e-9
"""A memory that exceeds a whole number of GPUs by less than this share of one still fits."""


@dataclass(frozen=True)
class LinearCost:
    """A cost that grows with every byte."""

    unit_bytes: float
    """M0."""
    price: float = 1.0
    """c: what M0 bytes cost."""

    def __post_init__(self) -> None:
        _check(self.unit_bytes, self.price)

    def __call__(self, memory: float) -> float:
        """The cost of that many bytes."""
        return self.price * memory / self.unit_bytes


@dataclass(frozen=True)
class LadderCost:
    """A cost per whole GPU."""

    unit_bytes: float
    """M0: the memory of one GPU."""
    price: float = 1.0
    """c: what a GPU costs."""

    def __post_init__(self) -> None:
        _check(self.unit_bytes, self.price)

    def count(self, memory: float) -> int:
        """How many GPUs hold that many bytes."""
        return max(1, math.ceil(memory / self.unit_bytes - ROUNDING))

    def __call__(self, memory: float) -> float:
        """The cost of that many bytes."""
        return self.price * self.count(memory)


def _check(unit_bytes: float, price: float) -> None:
    check_real("memory of one GPU (M0)", unit_bytes, minimum=1)
    check_real("price of one GPU (c)", price, minimum=0)


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's, by its dotted path; what it raises is said with its name."""

    path: str
    function: Callable[..., Any]

    @classmethod
    def load(cls, path: str) -> "UserFunction":
        """Import `package.module.function`."""
        module, _, name = path.rpartition(".")
        if not module:
            raise ValueError(f"{path!r} is no dotted path of a function; write e.g. my_package.my_module.my_function")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot import {path!r}: {error}") from error
        if not callable(function):
            raise ValueError(f"{path!r} is a {type(function).__name__}, not a function")
        return cls(path, function)

    def __call__(self, *arguments: Any) -> float:
        """Its value, which must be a number."""
        try:
            value = float(self.function(*arguments))
        except Exception as error:
            raise ValueError(f"{self.path} raised {type(error).__name__}: {error}") from error
        if math.isnan(value):
            raise ValueError(f"{self.path} gave NaN for {', '.join(map(str, arguments))}")
        return value


def build_cost(kind: str, *, unit_bytes: float, price: float = 1.0) -> CostFunction:
    """`ladder`, `linear`, or a dotted path."""
    kinds: dict[str, Callable[[], CostFunction]] = {
        "ladder": lambda: LadderCost(unit_bytes, price),
        "linear": lambda: LinearCost(unit_bytes, price),
    }
    return kinds[kind]() if kind in kinds else UserFunction.load(kind)
