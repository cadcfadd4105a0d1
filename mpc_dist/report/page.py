"""One self-contained HTML page of one or more runs: style, script and figures are in it, and nothing is loaded."""

import base64
import hashlib
import shlex
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mpc_dist import __version__
from mpc_dist.report.bars import memory_by_rank
from mpc_dist.report.card import Command, build_card
from mpc_dist.report.curves import (
    accuracy_by_boundary,
    bubble_by_step,
    horizon_history,
    loss_by_step,
    loss_by_time,
    throughput,
)
from mpc_dist.report.gantt import timeline
from mpc_dist.report.panel import LegendEntry, show
from mpc_dist.report.plan_panel import plan_panel
from mpc_dist.report.run import Run
from mpc_dist.report.svg import add, draw_mark, picture

PANELS = (
    loss_by_step,
    loss_by_time,
    accuracy_by_boundary,
    memory_by_rank,
    throughput,
    bubble_by_step,
    timeline,
    plan_panel,
    horizon_history,
)


def build_page(runs: Sequence[Run], *, written: datetime | None = None) -> str:
    """The page as text."""
    shown = show(runs)
    style, script = (_read(name) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"svg": _markup, "swatch": _swatch}
    names = [one.name for one in shown]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    repeat = Command("Write this page", shlex.join(["mpc-dist", "report", *(str(run.folder) for run in runs)]))
    return environment.from_string(_read("page.html.j2")).render(
        title=title,
        cards=[build_card(one) for one in shown],
        panels=[panel(shown) for panel in PANELS],
        report_command=repeat,
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
        written=(written or datetime.now()).strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page, making its folder."""
    page = build_page(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _read(name: str) -> str:
    return (files("mpc_dist.report") / "assets" / name).read_text(encoding="utf-8")


def _markup(element: Element, **attributes: str) -> Markup:
    """The drawing as it stands in a page: the tree has escaped its text."""
    for name, value in attributes.items():
        element.set(name.replace("_", "-"), value)
    return Markup(tostring(element, encoding="unicode", method="html"))


def _swatch(entry: LegendEntry) -> Markup:
    """A small picture of what a legend entry looks like in the figure."""
    svg = picture(22, 14, class_="swatch", aria_hidden="true")
    group = add(svg, "g", class_=f"series {entry.style}")
    line, _, shape = entry.swatch.partition(" ")
    if line == "line":
        add(group, "path", class_="line", d="M1 7H21")
        if shape:
            draw_mark(group, 11, 7, shape)
    elif entry.swatch == "tick":
        add(group, "line", class_="expected", x1=2, x2=20, y1=7, y2=7)
    elif entry.swatch in ("box", "faded", "hatch"):
        style = {"box": "bar", "faded": "bar faded", "hatch": "idle"}[entry.swatch]
        add(group, "rect", class_=f"{style} {entry.style}", x=3, y=1, width=16, height=12)
    else:
        draw_mark(group, 11, 7, entry.swatch)
    return _markup(svg)
