"""What the page is made of: a panel is one figure with its title, its words, or the reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from xml.etree.ElementTree import Element

from mpc_dist.report.replay import Replay, replay
from mpc_dist.report.run import Run, name_runs
from mpc_dist.report.svg import SHAPES

NUM_STYLES = 8
"""Colours that the style sheet has for runs."""


@dataclass(frozen=True)
class Shown:
    """A run with its name, colour and mark, the same in every figure."""

    run: Run
    name: str
    index: int

    @property
    def style(self) -> str:
        """The class that colours it."""
        return f"run-{self.index % NUM_STYLES}"

    @property
    def shape(self) -> str:
        """Its mark, so that colour is not all that tells it apart."""
        return SHAPES[(self.index + self.index // NUM_STYLES) % len(SHAPES)]

    @cached_property
    def replay(self) -> Replay | str:
        """A step measured and simulated, or why there is none."""
        try:
            return replay(self.run)
        except ValueError as error:
            return str(error)


def show(runs: Sequence[Run]) -> tuple[Shown, ...]:
    """Name and colour the runs."""
    names = name_runs([run.folder for run in runs])
    return tuple(Shown(run, name, index) for index, (run, name) in enumerate(zip(runs, names, strict=True)))


@dataclass(frozen=True)
class LegendEntry:
    """A swatch and its meaning."""

    text: str
    style: str
    """The class that colours it."""
    swatch: str
    """`line`, `box`, `faded`, `hatch`, `tick`, a mark's shape, or a line with one: `line circle`."""


@dataclass(frozen=True)
class Drawing:
    """A picture with words around it."""

    svg: Element
    heading: str = ""
    style: str = ""
    """The class of the run that it is of."""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers that are read better than drawn."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Panel:
    """A figure of the page."""

    id: str
    title: str
    caption: str
    """What is drawn, also read aloud as its description."""
    drawings: tuple[Drawing, ...] = ()
    legend: tuple[LegendEntry, ...] = ()
    notes: tuple[str, ...] = ()
    """What is left out, and why."""
    missing: str = ""
    """Why there is no figure."""
    tables: tuple[Table, ...] = ()
    is_wide: bool = False


def format_percent(share: float) -> str:
    """A share with one decimal where it is small enough to matter."""
    digits = 1 if 0.0005 <= share < 0.0995 else 0
    return f"{100 * share:.{digits}f}\u00a0%"
