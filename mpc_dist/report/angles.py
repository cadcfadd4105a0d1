"""What `mpc-dist angles` shows: a table, a figure and a JSON file of the angle and memory of every horizon."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table

from mpc_dist.profile import LineFit


@dataclass(frozen=True)
class HorizonReport:
    """The angle and memory of some horizons of one model, the last of them T."""

    title: str
    """What was measured, on one line."""
    horizons: NDArray[np.int64]
    """Ascending; the last is T, back-propagation."""
    cosines: NDArray[np.float64]
    """cos(theta_h) of each horizon."""
    peak_bytes: NDArray[np.int64]
    """M(h) of each horizon: peak bytes held for backward."""
    memory_fit: LineFit
    """The line through M(h)."""
    config: dict[str, Any]
    """The configuration that it was measured with."""

    @property
    def num_blocks(self) -> int:
        """T."""
        return int(self.horizons[-1])

    def table(self) -> Table:
        """A row per horizon."""
        table = Table(title=self.title, caption=self._describe_fit())
        for heading in ("h", "cos", "1 - cos^2", "bytes held", "of back-prop"):
            table.add_column(heading, justify="right")
        table.add_column("")
        names = {1: "forward-forward", self.num_blocks: "back-propagation"}
        for h, cosine, held in zip(self.horizons, self.cosines, self.peak_bytes, strict=True):
            share = held / self.peak_bytes[-1]
            residual = max(0.0, 1 - cosine**2)
            table.add_row(
                str(h), f"{cosine:.4f}", f"{residual:.2e}", format_bytes(held), f"{share:.1%}", names.get(int(h), "")
            )
        return table

    def _describe_fit(self) -> str:
        fit = self.memory_fit
        sign = "+" if fit.intercept >= 0 else "-"
        return (
            f"M(h) = {format_bytes(fit.slope)} * h {sign} {format_bytes(abs(fit.intercept))}, R^2 = {fit.r_squared:.4f}"
        )

    def figure(self) -> Figure:
        """1 - cos(theta_h) against T - h on log axes, and memory against h with its fitted line."""
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)

        ahead, error = self.num_blocks - self.horizons[:-1], 1 - self.cosines[:-1]
        shown = error > 0
        if shown.any():
            left.loglog(ahead[shown], error[shown], "o-", color="tab:blue", label="measured")
            start = np.flatnonzero(shown)[-1]
            cubic = error[start] * (ahead / ahead[start]) ** 3
            visible = cubic <= max(1.0, error[shown].max())
            left.loglog(ahead[visible], cubic[visible], ":", color="gray", label="slope 3 (deep linear theory)")
            left.legend()
            ticks = sorted({2**k for k in range(11) if 2**k < self.num_blocks} | {self.num_blocks - 1})
            left.set_xticks(ticks, labels=[str(tick) for tick in ticks])
            left.set_xticks([], minor=True)
        else:
            words = "every horizon equals\nback-propagation" if len(error) else "no other horizon\nwas measured"
            left.text(0.5, 0.5, words, ha="center", transform=left.transAxes)
        left.set_xlabel("T - h   (0 is back-propagation)")
        left.set_ylabel("1 - cos(theta_h)")
        left.set_title("How far the gradient is from back-propagation's")

        unit, scale = byte_unit(float(self.peak_bytes.max()))
        line = self.memory_fit.slope * self.horizons + self.memory_fit.intercept
        right.plot(self.horizons, self.peak_bytes / scale, "o", color="tab:orange", label="measured")
        right.plot(self.horizons, line / scale, "-", color="gray", label=f"line, R² = {self.memory_fit.r_squared:.4f}")
        right.set_ylim(bottom=0)
        right.xaxis.get_major_locator().set_params(integer=True)
        right.set_xlabel("horizon h   (1 is forward-forward)")
        right.set_ylabel(f"peak held for backward ({unit})")
        right.set_title("What it costs in memory")
        right.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3, which="both")
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the figure and the numbers; return their paths."""
        picture, numbers = folder / "angles.png", folder / "angles.json"
        self.figure().savefig(picture, dpi=150)
        content = {
            "title": self.title,
            "horizons": self.horizons.tolist(),
            "cosines": self.cosines.tolist(),
            "peak_bytes": self.peak_bytes.tolist(),
            "memory_fit": vars(self.memory_fit),
            "config": self.config,
        }
        numbers.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return picture, numbers


def byte_unit(size: float) -> tuple[str, float]:
    """The binary unit in which that many bytes are readable, and its size."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(np.log2(max(abs(size), 1)) // 10), len(units) - 1)
    return units[power], 1024.0**power


def format_bytes(size: float) -> str:
    """Bytes with a binary unit, to three or four digits."""
    unit, scale = byte_unit(size)
    return f"{size / scale:.{0 if unit == 'B' else 2}f} {unit}"
