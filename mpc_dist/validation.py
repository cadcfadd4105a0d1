"""Errors for what a user gave: each names the value, the limit and the remedy."""

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeGuard, TypeVar

T = TypeVar("T")

MAX_COUNT = 10**12
"""Of steps and other things that take time: more are not meant, and would outlast the machine."""
MAX_WIDTH = 2**24
"""Features: the product of two widths must be a number that torch can hold."""
LONGEST_VALUE = 200
"""Characters of a value that an error quotes."""
LONGEST_LINE = 1_200
"""Characters of an error."""


def check_whole(name: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """Raise unless `value` is a whole number within the limits (both inclusive)."""
    limits = f"{minimum}..{maximum}" if maximum is not None else f"{minimum} or more"
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {show(value)}; use {limits}")
    if value < minimum or (maximum is not None and value > maximum):
        raise ValueError(f"{name} {show(value)} is out of range; use {limits}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer of any kind (also numpy's); a boolean is not."""
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


def check_real(name: str, value: object, *, minimum: float, maximum: float | None = None) -> None:
    """Raise unless `value` is a finite number within the limits (`minimum` inclusive, `maximum` exclusive)."""
    limits = f"{minimum} <= {name} < {maximum}" if maximum is not None else f"{minimum} or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {show(value)}; use {limits}")
    if value < minimum or (maximum is not None and value >= maximum):
        raise ValueError(f"{name} {show(value)} is out of range; use {limits}")


def is_finite(value: float) -> bool:
    """Whether it is a number that a float can hold; a whole number may be too large for that."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_path(name: str, value: str) -> None:
    """Raise unless `value` can be a path at all."""
    parts = value.encode("utf-8", "surrogateescape").split(b"/")
    if not value or "\0" in value or len(value) > _LONGEST_PATH or any(len(part) > _LONGEST_NAME for part in parts):
        raise ValueError(f"{name} {show(value)} can be no path; use 1..{_LONGEST_NAME} bytes per name, none of them 0")


_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # of Linux


def check_memory(what: str, num_bytes: float, remedy: str, *, limit: float | None = None) -> None:
    """Raise if so many bytes cannot be held, by the given limit or by this machine at all."""
    have = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if limit is None else limit
    if num_bytes > have:
        raise ValueError(f"{what} would take {show_bytes(num_bytes)}, but there are {show_bytes(have)}; {remedy}")


def show_bytes(num_bytes: float) -> str:
    """In the largest unit that fits."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.3g} {unit}"


@contextmanager
def named(field: str) -> Iterator[None]:
    """An error about the values of a field begins with the field's path."""
    try:
        yield
    except ValueError as error:
        raise error if field in str(error) else ValueError(f"{field}: {error}") from error


def show(value: object) -> str:
    """The value as an error quotes it: on one line, and no longer than that."""
    if is_whole(value) and abs(int(value)) >= 10**LONGEST_VALUE:
        return f"a number of more than {LONGEST_VALUE} digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of a number with too many digits inside of it, or too deep
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def one_line(error: object) -> str:
    """An error's text as one line that any terminal can show: no control characters, not endless."""
    words = " ".join(str(error).split()) or type(error).__name__
    text = "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in words)
    if len(text) <= LONGEST_LINE:
        return text
    return f"{text[: LONGEST_LINE - 300]} ... {text[-250:]}"


def suggest(name: object, valid: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest valid one if any is near, then all of them."""
    known = sorted(valid)
    near = difflib.get_close_matches(show(name)[:LONGEST_VALUE].strip("'"), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}(known: {', '.join(known)})"


def look_up(what: str, name: object, registry: Mapping[str, T]) -> T:
    """The registry's entry of that name, or an error with the nearest valid name."""
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"unknown {what} {show(name)}; {suggest(name, registry)}")
    return registry[name]
