"""Charts as inline SVG: colours, fonts and themes are the page's style sheet's, so the shapes carry only classes.

Text goes through an XML tree, which escapes it.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from matplotlib.ticker import MaxNLocator

Format = Callable[[float], str]
SHAPES = ("circle", "square", "diamond", "triangle")
MAX_POINTS = 600
"""Points of a curve that are drawn; of more, the extremes of each stretch are."""
LOG_RATIO = 20.0
"""Positive values that differ by more than this factor are drawn on a logarithmic axis where the chart allows it."""


def add(parent: Element, tag: str, /, text: str | None = None, **attributes: object) -> Element:
    """A child element; `class_` and `text_anchor` become `class` and `text-anchor`."""
    child = SubElement(parent, tag, _attributes(attributes))
    child.text = text
    return child


def picture(width: float, height: float, **attributes: object) -> Element:
    """An empty drawing that scales with the page."""
    return Element("svg", _attributes({"viewBox": f"0 0 {width:g} {height:g}", "role": "img", **attributes}))


def _attributes(values: dict[str, object]) -> dict[str, str]:
    return {
        name.rstrip("_").replace("_", "-"): f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else str(value)
        for name, value in values.items()
    }


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Where the value is."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        place = math.log(value) if self.is_log else value
        return self.start + (place - low) / (high - low) * (self.end - self.start)


def fit_scale(
    values: Iterable[float],
    *,
    start: float,
    end: float,
    num_ticks: int = 6,
    least_span: float = 0.0,
    from_zero: bool = False,
    is_whole: bool = False,
    may_log: bool = False,
    is_tight: bool = False,
) -> Scale:
    """A scale on which all finite values have their place, with round ticks; `is_tight` ends it at the values.

    Values that differ by less than `least_span` are not stretched over the whole scale.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if may_log and low > 0 and high / low > LOG_RATIO:
        return _log_scale(low, high, start, end)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < least_span:
        middle = (low + high) / 2
        low, high = middle - least_span / 2, middle + least_span / 2
    if low == high:
        margin = abs(low) / 10 or 1.0
        low, high = low - (0 if from_zero else margin), high + margin
    ticks = MaxNLocator(num_ticks, steps=[1, 2, 2.5, 5, 10], integer=is_whole, min_n_ticks=2).tick_values(low, high)
    if is_tight:
        ticks = [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9]
    else:
        low, high = ticks[0], ticks[-1]
    return Scale(low, high, start, end, tuple(ticks), label_ticks(ticks))


def _log_scale(low: float, high: float, start: float, end: float) -> Scale:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= 7:
            break
    every = max(1, -(-len(inside) // 7))
    shown = tuple(inside[::every])
    return Scale(low / 1.1, high * 1.1, start, end, shown, tuple(f"{tick:g}" for tick in shown), is_log=True)


def label_ticks(ticks: Sequence[float]) -> tuple[str, ...]:
    """All ticks with the same number of decimals, as few as tell them apart."""
    step = min((b - a for a, b in itertools.pairwise(ticks)), default=1.0)
    decimals = next((d for d in range(9) if all(abs(round(t, d) - t) < step / 1000 for t in ticks)), 9)
    return tuple(f"{round(tick, decimals) + 0.0:,.{decimals}f}" for tick in ticks)


@dataclass(frozen=True)
class Series:
    """A curve, or marks without a line between them."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    """The class that colours it."""
    shape: str | None = None
    """The mark at every point; None: a line only."""
    is_line: bool = True
    is_steps: bool = False
    """Whether a value holds until the next one."""


@dataclass(frozen=True)
class LineChart:
    """Curves over one axis."""

    series: tuple[Series, ...]
    x_label: str
    y_label: str
    format_x: Format
    """For the values shown on pointing."""
    format_y: Format
    width: float = 560
    height: float = 310
    from_zero: bool = False
    may_log: bool = False
    whole_x: bool = False
    whole_y: bool = False
    least_span: float = 0.0
    """Values that differ by less are drawn as alike."""
    x_ticks: tuple[float, ...] | None = None
    x_limits: tuple[float, float] | None = None

    def draw(self, **attributes: object) -> Element:
        """As an element; what is shown on pointing goes with it as data."""
        svg = picture(self.width, self.height, class_="chart", **attributes)
        values = [value for one in self.series for _, value in one.points]
        y = fit_scale(
            values,
            start=self.height - 44,
            end=34,
            from_zero=self.from_zero,
            may_log=self.may_log,
            is_whole=self.whole_y,
            least_span=self.least_span,
        )
        left = 18 + 7.2 * max(map(len, y.labels))
        x = self._x_scale(left)
        draw_axes(svg, x, y, x_label=self.x_label, y_label=self.y_label)
        hover = []
        for one in self.series:
            finite = thin([point for point in one.points if math.isfinite(point[1])])
            places = [(x(a), y(b)) for a, b in finite]
            group = add(svg, "g", class_=f"series {one.style}")
            if one.is_line and len(places) > 1:
                add(group, "path", class_="line", d=_path(places, is_steps=one.is_steps))
            if one.shape is not None or len(places) == 1:
                for place, (a, b) in zip(places, finite, strict=True):
                    mark = draw_mark(group, *place, one.shape or "circle")
                    add(mark, "title", f"{one.name}: {self.format_y(b)} at {self.format_x(a)}")
            texts = [[self.format_x(a), self.format_y(b)] for a, b in finite]
            dots = [[round(px, 1), round(py, 1), *text] for (px, py), text in zip(places, texts, strict=True)]
            hover.append({"name": one.name, "style": one.style, "points": dots})
        svg.set(
            "data-hover",
            json.dumps({"left": x.start, "right": x.end, "top": y.end, "bottom": y.start, "series": hover}),
        )
        return svg

    def _x_scale(self, left: float) -> Scale:
        values = [value for one in self.series for value, _ in one.points]
        right = self.width - 18
        if self.x_ticks is not None:
            low, high = self.x_limits or (min(self.x_ticks), max(self.x_ticks))
            every = -(-len(self.x_ticks) // 16)
            # From the end, so that the last one is among those shown.
            shown = tuple(reversed(self.x_ticks[::-1][::every]))
            return Scale(low, high, left, right, shown, label_ticks(shown))
        return fit_scale([0.0, *values], start=left, end=right, is_tight=True, from_zero=True, is_whole=self.whole_x)


def draw_axes(svg: Element, x: Scale, y: Scale, *, x_label: str, y_label: str) -> None:
    """Grid lines, ticks and labels; the label of the upright axis stands above it, where it reads without turning."""
    grid, text = add(svg, "g", class_="grid"), add(svg, "g", class_="ticks")
    for tick, label in zip(y.ticks, y.labels, strict=True):
        add(grid, "line", x1=x.start, x2=x.end, y1=y(tick), y2=y(tick))
        add(text, "text", label, x=x.start - 8, y=y(tick) + 4, text_anchor="end")
    for tick, label in zip(x.ticks, x.labels, strict=True):
        add(grid, "line", class_="tick", x1=x(tick), x2=x(tick), y1=y.start, y2=y.start + 5)
        add(text, "text", label, x=x(tick), y=y.start + 19, text_anchor="middle")
    add(grid, "line", class_="base", x1=x.start, x2=x.end, y1=y.start, y2=y.start)
    labels = add(svg, "g", class_="labels")
    add(labels, "text", y_label, x=4, y=16)
    add(labels, "text", x_label, x=x.end, y=y.start + 38, text_anchor="end")


def draw_mark(parent: Element, x: float, y: float, shape: str, size: float = 4.2) -> Element:
    """A mark of one of the shapes."""
    if shape == "circle":
        return add(parent, "circle", class_="mark", cx=x, cy=y, r=size)
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        "triangle": [(0, -1.2), (1.2, 0.9), (-1.2, 0.9)],
    }[shape]
    return add(parent, "path", class_="mark", d=_path([(x + size * a, y + size * b) for a, b in corners]) + "Z")


def _path(places: Sequence[tuple[float, float]], *, is_steps: bool = False) -> str:
    parts = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for x, y in places[1:]:
        parts.append(f"H{x:.1f}V{y:.1f}" if is_steps else f"L{x:.1f} {y:.1f}")
    return "".join(parts)


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about that many points: of each stretch its lowest and highest, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = -(-2 * len(points) // limit)
    kept = {0, len(points) - 1}
    for first in range(0, len(points), size):
        stretch = range(first, min(first + size, len(points)))
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]
