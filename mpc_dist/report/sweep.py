"""What `mpc-dist sweep` shows: a table and a figure of several horizons, each over its seeds."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from mpc_dist.report.outcome import Outcome

MIB = 2.0**20


@dataclass(frozen=True)
class Family:
    """The runs of one horizon."""

    horizon: str
    """As the user wrote it."""
    ran: tuple[str, ...]
    """Which windows that came to; several if `auto` chose differently for different seeds."""
    outcomes: Mapping[int, Outcome]
    """By seed."""

    @property
    def title(self) -> str:
        """The horizon, and what was chosen if that was left open."""
        if self.horizon == "auto":
            return f"auto ({', '.join(self.ran)})"
        return f"h = {self.horizon}" if self.horizon.isdigit() else self.horizon

    def over_seeds(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a figure; the deviation of a single seed is 0."""
        values = [getattr(outcome, name) for outcome in self.outcomes.values()]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class SweepReport:
    """Families of runs, to be compared."""

    families: Sequence[Family]

    @property
    def ranked(self) -> list[Family]:
        """Lowest test loss first; a loss that is not a number comes last."""

        def key(family: Family) -> tuple[bool, float]:
            loss, _ = family.over_seeds("test_loss")
            return bool(np.isnan(loss)), loss

        return sorted(self.families, key=key)

    def table(self) -> Table:
        """A line per horizon, best first."""
        table = Table(
            title="horizons by test loss",
            caption="mean ± standard deviation over seeds; step: median of the slowest rank; MiB: the most a rank held",
        )
        for heading in ("horizon", "seeds", "test loss", "accuracy", "step ms", "peak MiB per rank", "GPUs", "time s"):
            table.add_column(heading, justify="left" if heading == "horizon" else "right")
        for family in self.ranked:
            some = next(iter(family.outcomes.values()))
            peaks = np.array([outcome.peak_bytes for outcome in _alike(family)]).max(axis=0) / MIB
            has_accuracy = some.test_accuracy is not None
            table.add_row(
                family.title,
                str(len(family.outcomes)),
                _with_spread(family, "test_loss", "{:.4f}"),
                _with_spread(family, "test_accuracy", "{:.2%}") if has_accuracy else "",
                f"{1000 * family.over_seeds('step_seconds')[0]:.1f}",
                ", ".join(f"{peak:.2f}" for peak in peaks),
                str(some.num_gpus),
                f"{family.over_seeds('seconds')[0]:.1f}",
            )
        return table

    def write(self, path: Path) -> None:
        """Every figure of every run, and each horizon's mean and deviation, as JSON; best horizon first."""
        content: list[dict[str, Any]] = []
        for family in self.ranked:
            loss, deviation = family.over_seeds("test_loss")
            seeds = {str(seed): asdict(outcome) for seed, outcome in family.outcomes.items()}
            content.append(
                {
                    "horizon": family.horizon,
                    "windows": list(family.ran),
                    "test_loss": loss,
                    "test_loss_deviation": deviation,
                    "step_seconds": family.over_seeds("step_seconds")[0],
                    "seconds": family.over_seeds("seconds")[0],
                    "seeds": seeds,
                }
            )
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def figure(self) -> Figure:
        """Test loss against steps and against time, a band over the seeds; memory and step time as bars."""
        figure = Figure(figsize=(13, 8), layout="constrained")
        ((by_step, by_time), (memory, speed)) = figure.subplots(2, 2, height_ratios=(3, 2))
        colours = {family.horizon: f"C{index % 10}" for index, family in enumerate(self.families)}
        for family in self.ranked:
            _draw_curves(by_step, family, "steps", colours[family.horizon])
            _draw_curves(by_time, family, "seconds", colours[family.horizon])
        by_step.set_xlabel("step")
        by_time.set_xlabel("seconds")
        for axes in (by_step, by_time):
            axes.set_xlim(left=0)
        by_step.set_title("Test loss by steps", loc="left", fontsize=10)
        by_time.set_title("Test loss by time", loc="left", fontsize=10)
        by_step.legend(title="test loss at the end", fontsize=8)
        self._draw_memory(memory, colours)
        self._draw_speed(speed, colours)
        for axes in (by_step, by_time, memory, speed):
            axes.grid(alpha=0.3, axis="both" if axes in (by_step, by_time) else "y")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in (by_step, by_time):
            axes.set_ylabel("test loss at the last boundary")
        return figure

    def _draw_memory(self, axes: Axes, colours: Mapping[str, str]) -> None:
        for position, family in enumerate(self.ranked):
            peaks = np.array([outcome.peak_bytes for outcome in _alike(family)]).max(axis=0) / MIB
            width = 0.8 / len(peaks)
            places = position - 0.4 + width * (np.arange(len(peaks)) + 0.5)
            axes.bar(places, peaks, width=0.92 * width, color=colours[family.horizon])
        axes.set_ylabel("MiB held at most")
        axes.set_title("Memory of each rank, rank 0 first", loc="left", fontsize=10)
        axes.set_xticks(range(len(self.ranked)), [family.title for family in self.ranked])

    def _draw_speed(self, axes: Axes, colours: Mapping[str, str]) -> None:
        for position, family in enumerate(self.ranked):
            mean, deviation = (1000 * value for value in family.over_seeds("step_seconds"))
            error = deviation if len(family.outcomes) > 1 else None
            axes.bar(position, mean, width=0.5, color=colours[family.horizon], yerr=error, capsize=4)
        axes.set_ylabel("ms per step")
        axes.set_title("Step time of the slowest rank", loc="left", fontsize=10)
        axes.set_xticks(range(len(self.ranked)), [family.title for family in self.ranked])


def _alike(family: Family) -> list[Outcome]:
    """The runs on as many ranks as the first had."""
    found = list(family.outcomes.values())
    return [outcome for outcome in found if outcome.num_gpus == found[0].num_gpus]


def _with_spread(family: Family, name: str, form: str) -> str:
    mean, deviation = family.over_seeds(name)
    return form.format(mean) + (f" ± {form.format(deviation)}" if len(family.outcomes) > 1 else "")


def _draw_curves(axes: Axes, family: Family, along: str, colour: str) -> None:
    """The mean over seeds at each evaluation, and a band from the lowest to the highest."""
    curves = [outcome.curve for outcome in family.outcomes.values()]
    count = min(len(curve.steps) for curve in curves)
    places = np.mean([getattr(curve, along)[:count] for curve in curves], axis=0)
    losses = np.array([curve.losses[:count] for curve in curves])
    mean, _ = family.over_seeds("test_loss")
    axes.plot(places, losses.mean(axis=0), "o-", ms=3, color=colour, label=f"{family.title}: {mean:.4f}")
    if len(curves) > 1:
        axes.fill_between(places, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.2, linewidth=0)
