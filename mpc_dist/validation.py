"""Errors for what a user gave: each names the value, the limit and the remedy."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TypeGuard, TypeVar

T = TypeVar("T")


def check_whole(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is a whole number within the limits (both inclusive)."""
    limits = f"{minimum}..{maximum}" if maximum is not None else f"{minimum} or more"
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}; use {limits}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name} {value} is out of range; use {limits}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer of any kind (also numpy's); a boolean is not."""
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def check_real(name: str, value: object, *, minimum: float, maximum: float | None = None) -> None:
    """Raise unless `value` is a finite number within the limits (`minimum` inclusive, `maximum` exclusive)."""
    limits = f"{minimum} <= {name} < {maximum}" if maximum is not None else f"{minimum} or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}; use {limits}")
    if value < minimum or (maximum is not None and value >= maximum):
        raise ValueError(f"{name} {value} is out of range; use {limits}")


def suggest(name: object, valid: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest valid one if any is near, then all of them."""
    known = sorted(valid)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}(known: {', '.join(known)})"


def look_up(what: str, name: object, registry: Mapping[str, T]) -> T:
    """The registry's entry of that name, or an error with the nearest valid name."""
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"unknown {what} {name!r}; {suggest(name, registry)}")
    return registry[name]
