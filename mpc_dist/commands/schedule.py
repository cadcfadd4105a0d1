"""`mpc-dist schedule`: build, validate, price and draw a schedule, without running anything."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mpc_dist.report.timeline import draw_figure
from mpc_dist.schedule import Costs, build_schedule, draw_timeline, lay_out, simulate, validate
from mpc_dist.validation import check_whole
from mpc_dist.windows import Windows, backprop, cumulative, loco, sliding, tumbling

SUMMARY = "Draw a pipeline schedule and its price: step time, bubble, micro-batches in flight."
KINDS = ("sliding", "tumbling", "cumulative", "loco", "backprop")


def run(argv: Sequence[str]) -> None:
    """Print the timeline and the price; write the figure and the text if asked to."""
    options = _parse(argv)
    check_whole("--stages", options.stages, minimum=1)
    costs = Costs.uniform(options.costs or [1.0] * options.stages, latency=options.latency)
    if len(costs.forward) != options.stages:
        raise ValueError(f"--costs has {len(costs.forward)} entries for {options.stages} stages; give one each")
    layout = lay_out(_windows(options), [1] * options.stages)
    schedule = build_schedule(layout, options.microbatches, split=options.split, cap=options.cap, costs=costs)
    validate(schedule, layout)
    price = simulate(schedule, layout, costs)

    console = Console()
    title = f"{options.windows} windows, {options.stages} stages, {options.microbatches} micro-batches"
    console.print(title, highlight=False)
    unit = min(costs.forward)
    drawn = draw_timeline(price.timeline, unit=unit, max_columns=console.width - 6)
    console.print(drawn, highlight=False, soft_wrap=True)
    console.print(
        f"step time {price.step_time:g}, bubble {min(price.bubble):.1%} to {max(price.bubble):.1%}, in flight up to "
        f"{max(price.in_flight)}, {price.num_messages} messages per step  (times in units of a stage's forward)",
        highlight=False,
        soft_wrap=True,
    )
    if options.out:
        draw_figure({title: price.timeline}).savefig(options.out, dpi=150)
        console.print(f"figure: {options.out}", highlight=False, soft_wrap=True)
    if options.text:
        options.text.write_text(f"{schedule}\n", encoding="utf-8")
        console.print(f"actions: {options.text}", highlight=False, soft_wrap=True)


def _windows(options: argparse.Namespace) -> Windows:
    if options.windows == "backprop":
        return backprop(options.stages)
    if options.windows == "loco":
        return loco(options.stages)
    if options.horizon is None:
        raise ValueError(f"{options.windows} windows need --horizon, a number of stages; use 1..{options.stages}")
    if options.windows == "sliding":
        return sliding(options.stages, options.horizon)
    return (tumbling if options.windows == "tumbling" else cumulative)(options.stages, options.horizon)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mpc-dist schedule",
        description=f"{SUMMARY} In the drawing F is a forward, R a relay, B a backward, I and W its input and weight "
        "half; numbers are micro-batches, dots are waiting.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--stages", type=int, default=8, help="stages, one per rank")
    parser.add_argument("--windows", choices=KINDS, default="sliding", help="which stage aims at which loss")
    parser.add_argument("--horizon", type=int, help="stages that a window looks ahead, or its size")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--split", action="store_true", help="cut backwards into an input half and a weight half")
    parser.add_argument("--cap", type=int, help="most micro-batches in flight; found by default")
    parser.add_argument("--costs", type=_numbers, help="each stage's forward time, e.g. 1,1,2,1")
    parser.add_argument("--latency", type=float, default=0.0, help="time of a message, in the same unit")
    parser.add_argument("--out", type=Path, help="file for the Gantt chart (.png or .svg)")
    parser.add_argument("--text", type=Path, help="file for the actions as text, a line per rank")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]
