"""Rows of a benchmark: what was measured, as a table and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One system in one setting."""

    system: str
    """`mpc_dist`, or a peer such as `torch-1F1B`."""
    windows: str
    """`sliding:2`, `tumbling:4`, `backprop`, ...; empty where it does not apply."""
    split: bool
    """Whether backwards are in two halves."""
    stages: int
    microbatches: int
    step_seconds: float
    """Median over the repeats."""
    spread: float
    """Largest minus smallest, in seconds."""
    repeats: int
    extra: dict[str, Any] = field(default_factory=dict)
    """What else was seen."""

    @classmethod
    def of_times(cls, times: Sequence[float], **settings: Any) -> "Row":
        """The row of repeated measurements."""
        return cls(
            step_seconds=statistics.median(times), spread=max(times) - min(times), repeats=len(times), **settings
        )


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as JSON, extras beside the other fields."""
    flat = [{**{k: v for k, v in asdict(row).items() if k != "extra"}, **row.extra} for row in rows]
    path.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")


def build_table(rows: Sequence[Row], title: str, *, unit: float | None = None) -> Table:
    """A line per row; with a unit, times also in units of it."""
    table = Table(title=title)
    extras = list(dict.fromkeys(name for row in rows for name in row.extra))
    headings = ["system", "windows", "split", "K", "M", "step ms", "spread ms"]
    for heading in [*headings, *(["units"] if unit else []), *extras]:
        table.add_column(heading, justify="left" if heading in ("system", "windows", "split") else "right")
    for row in rows:
        cells = [row.system, row.windows, "yes" if row.split else "", str(row.stages), str(row.microbatches)]
        cells += [f"{1000 * row.step_seconds:.2f}", f"{1000 * row.spread:.2f}"]
        cells += [f"{row.step_seconds / unit:.2f}"] if unit else []
        values = [row.extra.get(name, "") for name in extras]
        table.add_row(*cells, *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    return table
