"""The pictures of a run: its schedule as simulated, and the plan that it runs if there is one."""

from pathlib import Path

from matplotlib.figure import Figure

from mpc_dist.planner.plan import Plan
from mpc_dist.report.angles import byte_unit, format_bytes
from mpc_dist.report.plan import format_seconds
from mpc_dist.report.timeline import draw_figure
from mpc_dist.schedule import Costs, build_schedule, lay_out, simulate
from mpc_dist.training.config import Config

MOST_RANKS = 16
"""Of a schedule that are drawn: more could not be read."""
KINDS = {"sliding": "o", "cumulative": "s", "tumbling": "^", "backprop": "D"}


def draw_run(config: Config, costs: Costs | None) -> dict[str, Path]:
    """Draw them into the run folder; the file of each, by name."""
    folder = Path(config.training.folder)
    figures = {"schedule": draw_schedule(config, costs)}
    if (folder / "plan.yaml").exists():
        figures["plan"] = draw_plan(Plan.read(folder / "plan.yaml"))
    files = {name: folder / f"{name}.png" for name in figures}
    for name, path in files.items():
        figures[name].savefig(path, dpi=150)
    return files


def draw_schedule(config: Config, costs: Costs | None) -> Figure:
    """One simulated step of every stage, as the executor orders it."""
    layout = lay_out(config.horizon.build(config.partition), config.partition)
    parallel = config.parallel
    chosen = costs or Costs.uniform([float(len(blocks)) for blocks in layout.blocks])
    schedule = build_schedule(layout, parallel.microbatches, split=parallel.split, cap=parallel.cap, costs=costs)
    price = simulate(schedule, layout, chosen)
    title = (
        f"{config.horizon.windows} windows, {parallel.stages} stages, {parallel.microbatches} micro-batches: "
        f"bubble {min(price.bubble):.0%} to {max(price.bubble):.0%}"
    )
    if parallel.stages > MOST_RANKS:
        title += f" (the first {MOST_RANKS} stages)"
    return draw_figure({title: price.timeline[:MOST_RANKS]}, unit="forwards of a block" if costs is None else "seconds")


def draw_plan(plan: Plan) -> Figure:
    """What the plan chose among, and what it predicts for every rank."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    candidates, ranks = figure.subplots(1, 2, width_ratios=(3, 2))
    for kind, marker in KINDS.items():
        found = [one for one in plan.candidates if one.shape.windows == kind]
        if found:
            times, qualities = [1000 * one.step_seconds for one in found], [one.quality for one in found]
            candidates.scatter(times, qualities, marker=marker, alpha=0.5, label=kind, linewidths=0)
    chosen = plan.chosen
    at = (1000 * chosen.step_seconds, chosen.quality)
    candidates.scatter(*at, s=160, facecolors="none", edgecolors="black", linewidths=1.5, label="chosen")
    candidates.set_xlabel("predicted step time (ms)")
    candidates.set_ylabel("r^ = cos² of the angle to back-propagation")
    candidates.set_title(
        f"{len(plan.candidates)} candidates; chosen: {chosen.name}, {chosen.num_gpus} GPUs, "
        f"{format_seconds(chosen.step_seconds)}",
        fontsize=10,
    )
    candidates.legend(fontsize=8)
    candidates.grid(alpha=0.3)
    unit, scale = byte_unit(max(chosen.bytes_per_rank))
    ranks.bar(range(chosen.num_gpus), [size / scale for size in chosen.bytes_per_rank], color="tab:orange")
    top = max(chosen.bytes_per_rank) / scale
    if plan.gpu_memory / scale < 3 * top:
        ranks.axhline(plan.gpu_memory / scale, color="tab:red", ls=":", lw=1)
    ranks.set_xticks(range(chosen.num_gpus))
    ranks.set_xlabel("rank")
    ranks.set_ylabel(f"predicted memory ({unit})")
    ranks.set_title(f"Memory of a GPU: {format_bytes(plan.gpu_memory)}", fontsize=10)
    for axes in (candidates, ranks):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
