"""A cell is one independent piece of an experiment, and the store keeps what each cell gave.

A cell is known by its content: change any of its fields and it is another cell, which has not been run yet.
"""

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Result = dict[str, Any]
"""Plain values, as JSON holds them."""


class Cell(Protocol):
    """One piece of work; implementations are frozen dataclasses of plain values and other such dataclasses.

    A class whose `runs_alone` is true measures times on the clock: no other cell runs beside it.
    """

    def run(self) -> Result:
        """Do the work; the same cell gives the same result."""


def describe(cell: Cell) -> dict[str, Any]:
    """All that the cell's result depends on, as plain values."""
    assert dataclasses.is_dataclass(cell)
    assert not isinstance(cell, type)
    plain: dict[str, Any] = json.loads(json.dumps({"kind": type(cell).__name__, **dataclasses.asdict(cell)}))
    return plain


def key_of(cell: Cell) -> str:
    """Short and unique to the cell's content; a new field leaves it as it is while it has its default."""
    return hashlib.sha256(json.dumps(_given(cell), sort_keys=True).encode()).hexdigest()[:16]


def _given(value: Any) -> Any:
    """The value with its dataclasses as their type and the fields that differ from their defaults."""
    if dataclasses.is_dataclass(value):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        default = {entry.name: _default_of(entry) for entry in dataclasses.fields(value)}
        given = {name: _given(own) for name, own in fields.items() if own != default[name]}
        return {"kind": type(value).__name__, **given}
    return [_given(item) for item in value] if isinstance(value, (tuple, list)) else value


def _default_of(entry: "dataclasses.Field[Any]") -> Any:
    return entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default


@dataclass(frozen=True)
class Record:
    """What one cell gave."""

    name: str
    key: str
    cell: dict[str, Any]
    result: Result
    seconds: float
    """Processor seconds."""
    machine: dict[str, Any]

    @property
    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


class Store:
    """The cells that were run, one JSON line each; only ever appended to, so that an interrupted experiment goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, Record] = {}
        if path.is_file():
            self._read()

    def find(self, cell: Cell) -> Record | None:
        """What this very cell gave, if it was run."""
        return self._records.get(key_of(cell))

    def add(self, name: str, cell: Cell, result: Result, *, seconds: float) -> None:
        """Keep what a cell gave; on disk when this returns."""
        plain = json.loads(json.dumps(result))
        record = Record(name, key_of(cell), describe(cell), plain, round(seconds, 3), describe_machine())
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._records[record.key] = record

    def keep_only(self, cells: Mapping[str, Cell]) -> None:
        """Write the store anew with these cells alone, in this order: what was run for an earlier design goes."""
        kept = {key: self._records[key] for key in map(key_of, cells.values()) if key in self._records}
        beside = self._path.with_suffix(".new")
        beside.write_text("".join(record.line + "\n" for record in kept.values()), encoding="utf-8")
        beside.replace(self._path)
        self._records = kept

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8")
        if not text.endswith("\n") and text:
            # The last line was being written when the experiment was interrupted.
            text = text[: text.rfind("\n") + 1]
            self._path.write_text(text, encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                record = Record(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{self._path}, line {number}: no result of an experiment; remove it") from error
            self._records[record.key] = record


def describe_machine() -> dict[str, Any]:
    """What a time depends on, without naming the machine."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
