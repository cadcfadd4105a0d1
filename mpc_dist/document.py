"""Reads YAML and JSON that nobody vouches for: nothing is executed, and neither size nor depth can exhaust the reader.

A YAML alias is counted as often as it is used: a few lines of aliases of aliases can stand for more values than there
is memory.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, Event, NodeEvent, ScalarEvent

MAX_BYTES = 32 << 20
MAX_VALUES = 1_000_000
"""Scalars and collections, aliases expanded."""
MAX_DEPTH = 100
LONGEST_KEY = 1_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DocumentError(ValueError):
    """Why a file cannot be read, on one line and without its name."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises DocumentError, or OSError if there is no reading it."""
    text = _read_text(path)
    try:
        _check_events(yaml.parse(text, _Loader))
        return yaml.load(text, _UniqueKeyLoader)
    except DocumentError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, yaml.YAMLError) as error:
        # Of the YAML library's constructors, for what looks like a date, a set, ... and is none.
        raise DocumentError(" ".join(str(error).split())) from error


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises DocumentError, or OSError if there is no reading it."""
    text = _read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DocumentError(str(error)) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file beside, and put it in place: a full disk or a sudden end leaves the former content."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DocumentError(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _check_events(events: Iterable[Event]) -> None:
    """Raise if the document is deeper or larger than allowed, with its aliases expanded."""
    open_sizes = [0]
    open_anchors: list[str | None] = [None]
    sizes: dict[str, int] = {}
    for event in events:
        if isinstance(event, CollectionEndEvent):
            size, anchor = open_sizes.pop(), open_anchors.pop()
            open_sizes[-1] += size
        elif isinstance(event, CollectionStartEvent):
            open_sizes.append(1)
            open_anchors.append(event.anchor)
            if len(open_sizes) > MAX_DEPTH:
                raise DocumentError(f"it is nested deeper than {MAX_DEPTH} levels")
            continue
        elif isinstance(event, AliasEvent):
            if event.anchor in open_anchors:
                raise DocumentError(f"its alias *{event.anchor} refers to itself")
            size, anchor = sizes.get(event.anchor or "", 1), None  # one that is not defined is found by the library
            open_sizes[-1] += size
        elif isinstance(event, ScalarEvent):
            size, anchor = 1, event.anchor
            open_sizes[-1] += size
        else:
            assert not isinstance(event, NodeEvent)
            continue
        if anchor is not None:
            sizes[anchor] = size
        if open_sizes[-1] > MAX_VALUES:
            raise DocumentError(f"it has more than {MAX_VALUES:,} values, its aliases expanded")


class _UniqueKeyLoader(_Loader):  # type: ignore[misc]
    """Refuses a key that is given twice, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key.value, str):
                continue
            if key.value in seen:
                raise DocumentError(f"key {key.value[:LONGEST_KEY]!r} is given twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found
