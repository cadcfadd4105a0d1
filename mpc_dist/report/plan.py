"""What `mpc-dist plan` shows: the table of candidates, the reasons, and a figure of four panels."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from mpc_dist.planner.choose import Planned
from mpc_dist.planner.plan import Candidate
from mpc_dist.report.angles import byte_unit, format_bytes
from mpc_dist.report.timeline import draw_axes, legend_of
from mpc_dist.schedule import build_schedule, lay_out, simulate


@dataclass(frozen=True)
class PlanReport:
    """A plan, to be looked at."""

    planned: Planned

    def table(self) -> Table:
        """Of every kind of candidate the best, best first."""
        plan = self.planned.plan
        has_trials = any(one.trial_quality is not None for one in plan.candidates)
        table = Table(
            title=f"the best of each kind, of {len(plan.candidates)} candidates that fit "
            f"{format_bytes(plan.gpu_memory)} per GPU; objective {plan.objective}"
        )
        headings = ["windows", "GPUs", "M", "partition", "fullest rank", "step", "bubble", "r^", "objective"]
        for heading in [*headings, *(["trial loss", "trial r"] if has_trials else [])]:
            table.add_column(heading, justify="left" if heading in ("windows", "partition") else "right")
        best: dict[str, Candidate] = {}
        for one in plan.candidates:
            best.setdefault(one.name, one)
        for one in best.values():
            tried = one.trial_quality is not None
            sizes = "|".join(map(str, one.partition))
            row = [
                one.name,
                str(one.num_gpus),
                str(one.microbatches),
                sizes if len(sizes) <= 24 else f"{sizes[:21]}...",
                format_bytes(max(one.bytes_per_rank)),
                format_seconds(one.step_seconds),
                f"{one.bubble:.0%}",
                f"{one.quality:.3f}",
                f"{one.value:.4g}",
            ]
            if has_trials:
                row += [f"{one.trial_loss:.4f}", f"{one.trial_quality:.3f}"] if tried else ["", ""]
            table.add_row(*row, style="bold" if one == plan.chosen else None)
        return table

    def lines(self) -> Iterator[str]:
        """What the table does not say."""
        plan, selection = self.planned.plan, self.planned.selection
        yield (
            f"Algorithm 1: h* = {plan.horizon} of {len(selection.choices)} blocks from horizons "
            f"{', '.join(map(str, selection.measured))} (memory R^2 {selection.memory_fit.r_squared:.4f}, cosine R^2 "
            f"{selection.cosine_fit.r_squared:.4f}, worst residual {selection.cosine_fit.worst_residual:.4f})"
        )
        realised = "none" if plan.realised_gpus is None else plan.realised_gpus
        yield f"GPUs for h*: ladder {plan.ladder_gpus}, realised {realised}: {plan.why}"
        chosen = plan.chosen
        yield (
            f"chosen: {chosen.name}, {chosen.num_gpus} GPUs, {chosen.microbatches} micro-batches, {chosen.in_flight} "
            "in flight" + (": back-propagation is the better choice here" if chosen.shape.windows == "backprop" else "")
        )
        yield from (f"note: {note}" for note in plan.notes)

    def figure(self) -> Figure:
        """Cosine, memory, objective, and the predicted timeline."""
        figure = Figure(figsize=(13, 8.5), layout="constrained")
        ((cosine, memory), (objective, timeline)) = figure.subplots(2, 2)
        self._draw_cosine(cosine)
        self._draw_memory(memory)
        self._draw_objective(objective)
        self._draw_timeline(timeline)
        for axes in (cosine, memory, objective):
            axes.set_xlabel("horizon h in blocks")
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    def _draw_cosine(self, axes: Axes) -> None:
        selection = self.planned.selection
        every = np.arange(1, len(selection.choices) + 1)
        points = self.planned.cosines
        axes.plot(every, np.clip(selection.cosine_fit.at(list(every)), 0, 1), "-", color="gray", label="cubic fit")
        axes.plot(list(points), list(points.values()), "o", color="tab:blue", label="measured")
        axes.set_ylim(0, 1.05)
        axes.set_ylabel("cos(theta_h)")
        axes.set_title(f"Angle to back-propagation, R² = {selection.cosine_fit.r_squared:.4f}")
        axes.legend()

    def _draw_memory(self, axes: Axes) -> None:
        selection, plan = self.planned.selection, self.planned.plan
        every = np.arange(1, len(selection.choices) + 1)
        points = self.planned.memory
        unit, scale = byte_unit(max(points.values()))
        axes.plot(every, selection.memory_fit.at(list(every)) / scale, "-", color="gray", label="line fit")
        axes.plot(list(points), np.array(list(points.values())) / scale, "o", color="tab:orange", label="measured")
        top = max(points.values()) * 1.1
        rungs = np.arange(1, int(top / plan.gpu_memory) + 1)
        shown = rungs if len(rungs) <= 12 else rungs[:: len(rungs) // 12 + 1]
        for rung in shown:
            axes.axhline(rung * plan.gpu_memory / scale, color="tab:red", lw=0.8, ls=":")
            words = f"{rung} GPU" if rung == 1 else f"{rung} GPUs"
            axes.annotate(words, (1, rung * plan.gpu_memory / scale), color="tab:red", fontsize=8, va="bottom")
        axes.set_ylim(0, top / scale)
        axes.set_ylabel(f"M(h), one device ({unit})")
        axes.set_title(f"Memory and the ladder of M0 = {format_bytes(plan.gpu_memory)}")
        axes.legend(loc="lower right")

    def _draw_objective(self, axes: Axes) -> None:
        selection, plan = self.planned.selection, self.planned.plan
        every = np.arange(1, len(selection.choices) + 1)
        values = np.array(selection.values)
        finite = np.isfinite(values)
        axes.plot(every[finite], values[finite], "o-", color="tab:green", ms=4)
        axes.axvline(selection.horizon, color="black", ls="--", lw=1)
        on_left = selection.horizon > len(values) / 2
        words, side = f" h* = {selection.horizon} ", "right" if on_left else "left"
        axes.annotate(words, (selection.horizon, values[finite].max()), va="top", ha=side)
        missing = int(np.sum(~finite))
        axes.set_ylabel(f"objective {plan.objective}")
        axes.set_title("Objective by Algorithm 1" + (f" ({missing} horizons infeasible)" if missing else ""))

    def _draw_timeline(self, axes: Axes) -> None:
        chosen = self.planned.plan.chosen
        layout = lay_out(chosen.shape.over_blocks(chosen.partition), chosen.partition)
        costs = self.planned.planner.costs(layout, chosen.microbatches, checkpoint=chosen.checkpoint)
        schedule = build_schedule(layout, chosen.microbatches, split=chosen.split, cap=chosen.cap, costs=costs)
        price = simulate(schedule, layout, costs)
        used = draw_axes(axes, price.timeline, unit="seconds")
        axes.legend(handles=legend_of(used), loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8, ncols=6)
        axes.set_title(f"Predicted step of the plan: {chosen.name}, {format_seconds(price.step_time)}")


def format_seconds(seconds: float) -> str:
    """Seconds with a readable unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
