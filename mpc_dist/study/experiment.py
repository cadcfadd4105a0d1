"""An experiment: its cells, and the page made of what they gave, with tables, figures and verdicts on claims.

The page is a function of the store alone, so every number on it is found there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from mpc_dist.study.cell import Cell, Record

VerdictWord = Literal["confirmed", "confirmed with limits", "not confirmed"]
Records = Mapping[str, Record]
"""What each cell gave, by the cell's name; an interrupted experiment lacks some."""


@dataclass(frozen=True)
class Verdict:
    """What we found of a claim."""

    claim: str
    """As the source puts it, in a sentence, with its place (section or figure)."""
    verdict: VerdictWord
    evidence: str
    """The numbers, made from the records."""


@dataclass(frozen=True)
class Table:
    """Rows of plain text under a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_markdown(self) -> str:
        """The table as it stands in a page."""
        lines = [f"**{self.title}**", "", _row(self.columns), _row(["---"] * len(self.columns))]
        return "\n".join([*lines, *map(_row, self.rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Picture:
    """A figure with its caption, which says the sizes and seeds."""

    name: str
    """File name without its suffix."""
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Findings:
    """What an experiment's records say."""

    summary: str
    """A few sentences, surprises first."""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Sizes, seeds, and what differs from the source, a sentence each."""


@dataclass(frozen=True)
class Experiment:
    """One study that `mpc-dist reproduce` runs."""

    name: str
    title: str
    build_cells: Callable[[bool], Mapping[str, Cell]]
    """(whether quick) -> cells by name."""
    conclude: Callable[[Records], Findings]
    """What the records of all cells, full or quick, say."""
    needs: tuple[str, ...] = ()
    """Files and folders that must be there, besides what is installed, e.g. data/cifar-10-batches-py."""
    page_beside: bool = False
    """Whether the page stands beside its folder, as NAME.md, instead of in it as README.md; alone it has no index."""


def write_page(experiment: Experiment, findings: Findings, records: Records, folder: Path, *, quick: bool) -> Path:
    """Write the figures into the experiment's folder, and the page into or beside it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in findings.pictures:
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=110)
    page = page_path(experiment, folder)
    page.write_text(render_page(experiment, findings, records, quick=quick), encoding="utf-8")
    return page


def page_path(experiment: Experiment, folder: Path) -> Path:
    """Where the page of an experiment is whose records are in this folder."""
    return folder.with_name(f"{folder.name}.md") if experiment.page_beside else folder / "README.md"


def render_page(experiment: Experiment, findings: Findings, records: Records, *, quick: bool) -> str:
    """The page's text."""
    folder = f"{experiment.name}/" if experiment.page_beside else ""
    command = f"mpc-dist reproduce {experiment.name}" + (" --quick" if quick else "")
    hours = sum(record.seconds for record in records.values()) / 3600
    machines = {
        f"{m['cores']} cores ({m['architecture']}), Python {m['python']}, torch {m['torch']}"
        for m in (record.machine for record in records.values())
    }
    parts = [
        f"# {experiment.title}",
        f"`{command}`: {len(records)} runs, {hours:.2f} processor hours, one thread each, on "
        f"{' and '.join(sorted(machines))}. Every number below is made from "
        f"[cells.jsonl]({folder}cells.jsonl), a line per run.",
        findings.summary,
    ]
    if findings.verdicts:
        rows = tuple((one.claim, f"**{one.verdict}**", one.evidence) for one in findings.verdicts)
        parts.append(Table("Claims", ("claim", "verdict", "evidence"), rows).as_markdown())
    parts += [
        f"![{picture.caption}]({folder}{picture.name}.png)\n\n*{picture.caption}*" for picture in findings.pictures
    ]
    parts += [table.as_markdown() for table in findings.tables]
    if findings.notes:
        parts.append("\n".join(["## Sizes, seeds and differences", "", *(f"- {note}" for note in findings.notes)]))
    return "\n\n".join(parts) + "\n"
