"""Builds frozen dataclasses from plain values, as JSON and YAML have them, by the types of their fields.

What does not fit is said with its path, e.g. `chosen.partition[1] must be a whole number, got 'x'`.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mpc_dist.validation import is_finite, is_whole, show

Kind = TypeVar("Kind")


def build(kind: type[Kind], value: object, path: str = "") -> Kind:
    """The dataclass of that kind; raises ValueError with the path of what does not fit."""
    found: Kind = _build(kind, value, path)
    return found


def _build(kind: Any, value: object, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_fields(kind, value, path)
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (other,) = (one for one in inner if one is not type(None))
        return _build(other, value, path)
    if origin is Literal:
        if not any(value == one and type(value) is type(one) for one in inner):
            raise _misfit(path, f"one of {', '.join(map(repr, inner))}", value)
        return value
    if origin is tuple:
        assert inner[1:] == (...,)
        if not isinstance(value, (list, tuple)):
            raise _misfit(path, "a list", value)
        return tuple(_build(inner[0], one, f"{path}[{index}]") for index, one in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _misfit(path, "a mapping with words as keys", value)
        return {key: _build(inner[1], one, f"{path}.{key}" if path else key) for key, one in value.items()}
    return _build_scalar(kind, value, path)


def _build_scalar(kind: Any, value: object, path: str) -> Any:
    if kind is int and is_whole(value):
        return value
    if kind is float and (is_whole(value) or isinstance(value, float)):
        # Infinity stands for what has no limit, and not-a-number for what training came to.
        if is_whole(value) and not is_finite(value):
            raise _misfit(path, "a number that a float can hold", value)
        return float(value)
    if kind in (str, bool) and type(value) is kind:
        return value
    names = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    raise _misfit(path, names[kind], value)


def _build_fields(kind: Any, value: object, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _misfit(path, "a mapping", value)
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    prefix = f"{path}." if path else ""
    for key in value:
        if key not in fields:
            raise ValueError(f"unknown key {show(f'{prefix}{key}')}; known: {', '.join(fields)}")
    for name, field in fields.items():
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_needed and name not in value:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**{key: _build(hints[key], one, f"{prefix}{key}") for key, one in value.items()})


def _misfit(path: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{path or 'it'} must be {wanted}, got {show(value)}")
