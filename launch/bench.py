"""Benchmarks: each is a ratio against a peer in the same run, repeats alternating, medians reported.

python launch/bench.py schedule --stages 8 --microbatches 1,4,8 --json out.json
python launch/bench.py compute --microbatches 2,4,8,16 --repeats 5
python launch/bench.py memory
python launch/bench.py scale
python launch/bench.py angles --blocks 16 --repeats 7
python launch/bench.py actions --against ../another_checkout
python launch/bench.py plan --stages 2,4
python launch/bench.py regret --cifar data/cifar-10-batches-py
python launch/bench.py adaptive --steps 400
python launch/bench.py checkpoint --stages 8
python launch/bench.py tracking --ranks 8
python launch/bench.py protection --ranks 8
python launch/bench.py link --out slow_link.png
python launch/bench.py growth --ranks 8,64,256
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpc_dist.bench.actions import bench_actions
from mpc_dist.bench.adaptive import AdaptiveSetting, bench_adaptive, draw_curves
from mpc_dist.bench.alternate import AlternatingSetting
from mpc_dist.bench.angles import bench_angles
from mpc_dist.bench.checkpoint import SavingSetting, bench_checkpoint
from mpc_dist.bench.compile import CompileSetting, bench_compile
from mpc_dist.bench.compute import ComputeSetting, bench_compute
from mpc_dist.bench.growth import bench_growth, write_page
from mpc_dist.bench.link import LinkSetting, bench_link, draw_link
from mpc_dist.bench.memory import bench_memory
from mpc_dist.bench.peers import PEERS
from mpc_dist.bench.plan import MODELS, bench_plan
from mpc_dist.bench.planning import planning_seconds
from mpc_dist.bench.protection import bench_protection
from mpc_dist.bench.regret import bench_regret, list_models
from mpc_dist.bench.rows import Row, build_table, write_rows
from mpc_dist.bench.scale import bench_scale
from mpc_dist.bench.schedule import WINDOWS, Setting, bench_schedule, list_systems, speed_ups
from mpc_dist.bench.tracking import bench_tracking
from mpc_dist.data import TextData
from mpc_dist.models import GPT
from mpc_dist.training.config import Config
from mpc_dist.training.sections import OptimizerConfig


def numbers(text: str) -> tuple[float, ...]:
    """A list such as 1,4,8."""
    return tuple(float(word) for word in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    """A list such as 1,4,8."""
    return tuple(int(word) for word in text.split(","))


def run_angles(options: argparse.Namespace, console: Console) -> list[Row]:
    """The angle of every horizon of a gpt: one pass for all, against each horizon separately."""
    torch.set_num_threads(options.threads)
    rows = bench_angles(
        blocks=options.blocks,
        width=options.width,
        context=options.context,
        batch_size=options.batch_size,
        repeats=options.repeats,
    )
    console.print(build_table(rows, "angles of all horizons"))
    return rows


def run_schedule(options: argparse.Namespace, console: Console) -> list[Row]:
    """Step time on gloo ranks with emulated compute, beside torch's schedules."""
    costs = options.costs or (1.0,) * options.stages
    if len(costs) != options.stages:
        raise ValueError(f"--costs has {len(costs)} entries for {options.stages} stages; give one each")
    setting = Setting(
        num_stages=options.stages,
        microbatches=options.microbatches,
        windows=WINDOWS,
        peers=() if options.no_peers else PEERS,
        seconds=options.f,
        costs=costs,
        repeats=options.repeats,
        repeat_seconds=options.seconds,
        latency=options.latency,
        plain_sleep=options.plain_sleep,
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(list_systems(setting)) * setting.repeats)
        rows = bench_schedule(setting, lambda: progress.advance(task))
    console.print(build_table(rows, f"{options.stages} ranks, f = {1000 * options.f:g} ms (units: step time / f)"))
    for found in speed_ups(rows):
        name, peer = f"{found['windows']}{' split' if found['split'] else ''}", found["against"]
        console.print(
            f"M = {found['microbatches']}: {name} is {found['speed_up']:.2f}x as fast as {peer}", highlight=False
        )
    return rows


def run_scale(options: argparse.Namespace, console: Console) -> list[Row]:
    """Simulated step time against the number of stages."""
    windows = [("sliding:1", False), ("sliding:2", True), ("tumbling:4", True), ("backprop", True), ("backprop", False)]
    rows = bench_scale(options.stages, windows, options.microbatches)
    console.print(build_table(rows, "simulated step, in units of one stage's forward", unit=1.0))
    return rows


def run_compute(options: argparse.Namespace, console: Console) -> list[Row]:
    """Real compute on local ranks with one thread each, beside torch's 1F1B and one process."""
    setting = ComputeSetting(
        num_ranks=options.stages,
        num_blocks=options.blocks,
        width=options.width,
        batch_size=options.batch_size,
        microbatches=options.microbatches,
        repeats=options.repeats,
    )
    rows = bench_compute(setting)
    console.print(
        build_table(rows, f"{options.blocks} residual MLP blocks, width {options.width}, on {options.stages} ranks")
    )
    return rows


def run_compile(options: argparse.Namespace, console: Console) -> list[Row]:
    """The first and later steps of a GPT whose blocks are compiled, beside the same as written, in one process."""
    setting = CompileSetting(
        num_blocks=options.blocks,
        width=options.width,
        context=options.context,
        batch_size=options.batch_size,
        num_microbatches=options.microbatches,
        repeats=options.repeats,
    )
    with console.status("measuring"):
        rows = bench_compile(setting)
    console.print(build_table(rows, f"{options.blocks} GPT blocks, width {options.width}, context {options.context}"))
    return rows


def run_actions(options: argparse.Namespace, console: Console) -> list[Row]:
    """The host's time per action of 6 tiny GPT blocks, beside another checkout's."""
    checkouts = {"mpc_dist": Path(__file__).parents[1]}
    checkouts |= {} if options.against is None else {str(options.against): options.against}
    rows = bench_actions(checkouts, options.repeats)
    console.print(build_table(rows, "median time per action"))
    return rows


def run_memory(options: argparse.Namespace, console: Console) -> list[Row]:
    """Peak live activation bytes per rank against the horizon."""
    rows = bench_memory(
        num_stages=options.stages, num_microbatches=options.microbatches, width=options.width, context=options.context
    )
    console.print(build_table(rows, f"a gpt on {options.stages} stages, one block each"))
    return rows


def run_plan(options: argparse.Namespace, console: Console) -> list[Row]:
    """What the planner predicts, beside what the planned runs do."""
    names = tuple(name for name in MODELS if options.model in (None, name))
    if not names:
        raise ValueError(f"unknown model {options.model!r}; use one of {', '.join(MODELS)}")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("planning and running", total=2 * len(names) * len(options.stages))
        rows = bench_plan(options.stages, names, on_progress=lambda: progress.advance(task))
    console.print(build_table(rows, "predicted and measured"))
    return rows


def run_regret(options: argparse.Namespace, console: Console) -> list[Row]:
    """What choosing h* from at most six horizons costs, by the objective's own measure."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring every horizon", total=len(list_models(options.cifar)))
        rows = bench_regret(options.cifar, on_progress=lambda: progress.advance(task))
    table = Table(title="h* from at most six horizons, against all of them")
    for heading in rows[0].extra:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.extra.values()))
    console.print(table)
    return rows


def run_adaptive(options: argparse.Namespace, console: Console) -> list[Row]:
    """Loss against simulated time on 8 stages, of the adaptive horizon beside each fixed one."""
    config = Config(
        model=GPT(num_blocks=8, width=64, num_heads=4),
        data=TextData(context=64, max_bytes=2_000_000),
        optimizer=OptimizerConfig("adamw", lr=2e-3),
        batch_size=16,
        seed=options.seed,
        device="cpu",
    )
    setting = AdaptiveSetting(config, options.microbatches, options.steps, options.every)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training each choice", total=5)
        rows, curves = bench_adaptive(setting, lambda: progress.advance(task))
    console.print(build_table(rows, "test loss after the same simulated time", unit=1.0))
    for time, size, reason in curves["adaptive"].changes:
        console.print(f"at {time:g}: {size} stages; {reason}", highlight=False)
    if options.out:
        draw_curves(curves).savefig(options.out, dpi=150)
        console.print(f"figure: {options.out}", highlight=False, soft_wrap=True)
    return rows


def run_checkpoint(options: argparse.Namespace, console: Console) -> list[Row]:
    """Mean step time with a checkpoint every few steps against none, on gloo ranks with emulated compute."""
    setting = SavingSetting(
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        seconds=options.f,
        bytes_per_rank=options.megabytes * 2**20,
        every=options.every,
        num_steps=options.steps,
        repeats=options.repeats,
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 * setting.repeats)
        rows = bench_checkpoint(setting, lambda: progress.advance(task))
    console.print(build_table(rows, f"{options.megabytes} MiB per rank saved every {options.every} steps"))
    return rows


def read_alternating(options: argparse.Namespace) -> AlternatingSetting:
    """What tracking and protection are measured with."""
    return AlternatingSetting(
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        seconds=options.f,
        num_steps=options.steps,
        repeats=options.repeats,
    )


def run_tracking(options: argparse.Namespace, console: Console) -> list[Row]:
    """Step time with every step tracked in W&B (offline) beside untracked, on gloo ranks with emulated compute."""
    setting = read_alternating(options)
    with console.status("measuring"):
        rows = bench_tracking(setting)
    console.print(build_table(rows, f"{options.ranks} ranks, f = {1000 * options.f:g} ms, a line per step and rank"))
    return rows


def run_protection(options: argparse.Namespace, console: Console) -> list[Row]:
    """Step time with all protection beside none, on gloo ranks with emulated compute."""
    setting = read_alternating(options)
    with console.status("measuring"):
        rows = bench_protection(setting)
    console.print(build_table(rows, f"{options.ranks} ranks, f = {1000 * options.f:g} ms"))
    return rows


def run_link(options: argparse.Namespace, console: Console) -> list[Row]:
    """Step time of each horizon with slow links between hosts, which are network namespaces (Linux, root)."""
    setting = LinkSetting(
        num_stages=options.stages,
        num_microbatches=options.microbatches,
        seconds=options.f,
        kibibytes=options.kibibytes,
        delays=options.delays,
        megabits=options.megabits,
        repeats=options.repeats,
        repeat_seconds=options.seconds,
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(setting.links) * setting.repeats)
        rows = bench_link(setting, lambda: progress.advance(task))
    console.print(build_table(rows, f"a stage per host, f = {1000 * options.f:g} ms, {options.kibibytes} KiB messages"))
    if options.out:
        draw_link(rows, setting).savefig(options.out, dpi=130)
        console.print(f"figure: {options.out}", highlight=False, soft_wrap=True)
    return rows


def run_growth(options: argparse.Namespace, console: Console) -> list[Row]:
    """Sockets, opened files and start-up time per rank at ever more ranks, which are processes here (Linux)."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(options.ranks))
        rows = bench_growth(options.ranks, planning_seconds, on_done=lambda _: progress.advance(task))
    console.print(write_page(rows), highlight=False, markup=False, soft_wrap=True)
    return rows


Benchmark = Callable[[argparse.Namespace, Console], list[Row]]


def build_parser() -> argparse.ArgumentParser:
    """A sub-command per benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True)

    def add(name: str, run: Benchmark) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--json", type=Path, help="file for the rows")
        command.set_defaults(run=run)
        return command

    angles = add("angles", run_angles)
    angles.add_argument("--blocks", type=int, default=16, help="blocks of the gpt")
    angles.add_argument("--width", type=int, default=128, help="features of a state")
    angles.add_argument("--context", type=int, default=128, help="tokens per sample")
    angles.add_argument("--batch-size", type=int, default=8, help="samples")
    angles.add_argument("--repeats", type=int, default=7, help="timed rounds after one warm-up round")
    angles.add_argument("--threads", type=int, default=1, help="threads of torch")

    schedule = add("schedule", run_schedule)
    schedule.add_argument("--stages", type=int, default=8, help="ranks, one stage each")
    schedule.add_argument("--microbatches", type=whole_numbers, default=(1, 4, 8), help="numbers of micro-batches")
    schedule.add_argument("--f", type=float, default=0.01, help="seconds of one stage's forward of one micro-batch")
    schedule.add_argument("--costs", type=numbers, help="each stage's cost relative to f, e.g. 1,1,2,1")
    schedule.add_argument("--repeats", type=int, default=3, help="rounds in which the systems alternate")
    schedule.add_argument("--seconds", type=float, default=2.0, help="about how long a system runs in each round")
    schedule.add_argument("--latency", type=float, default=0.0005, help="seconds per message to build the order for")
    schedule.add_argument(
        "--plain-sleep", action="store_true", help="do not take off what this machine oversleeps (ours and peers alike)"
    )
    schedule.add_argument("--no-peers", action="store_true", help="leave out torch's schedules")

    compute = add("compute", run_compute)
    compute.add_argument("--stages", type=int, default=2, help="ranks, one thread each")
    compute.add_argument("--blocks", type=int, default=16, help="residual MLP blocks")
    compute.add_argument("--width", type=int, default=512, help="features of a state; four times as many inside")
    compute.add_argument("--batch-size", type=int, default=512, help="samples per step")
    compute.add_argument("--microbatches", type=whole_numbers, default=(2, 4, 8, 16), help="numbers of micro-batches")
    compute.add_argument("--repeats", type=int, default=5, help="rounds in which the systems alternate")

    actions = add("actions", run_actions)
    actions.add_argument("--against", type=Path, help="another checkout of this repository")
    actions.add_argument("--repeats", type=int, default=5, help="rounds in which the checkouts alternate")

    compile_ = add("compile", run_compile)
    compile_.add_argument("--blocks", type=int, default=6, help="blocks of the gpt")
    compile_.add_argument("--width", type=int, default=32, help="features of a state")
    compile_.add_argument("--context", type=int, default=16, help="tokens per sample")
    compile_.add_argument("--batch-size", type=int, default=8, help="samples per step")
    compile_.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    compile_.add_argument("--repeats", type=int, default=7, help="rounds in which the two alternate")

    memory = add("memory", run_memory)
    memory.add_argument("--stages", type=int, default=8, help="stages")
    memory.add_argument("--microbatches", type=int, default=16, help="micro-batches")
    memory.add_argument("--width", type=int, default=64, help="features of a state")
    memory.add_argument("--context", type=int, default=64, help="tokens per sample")

    plan = add("plan", run_plan)
    plan.add_argument("--stages", type=whole_numbers, default=(2, 4), help="numbers of ranks")
    plan.add_argument("--model", help=f"one of {', '.join(MODELS)}; default: all")

    regret = add("regret", run_regret)
    regret.add_argument("--cifar", default="data/cifar-10-batches-py", help="CIFAR-10's python-version folder")

    adaptive = add("adaptive", run_adaptive)
    adaptive.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    adaptive.add_argument("--steps", type=int, default=400, help="steps of back-propagation whose time each gets")
    adaptive.add_argument("--every", type=int, default=50, help="steps between decisions")
    adaptive.add_argument("--seed", type=int, default=0, help="of weights and data")
    adaptive.add_argument("--out", type=Path, help="file for the figure")

    checkpoint = add("checkpoint", run_checkpoint)
    checkpoint.add_argument("--stages", type=int, default=8, help="ranks")
    checkpoint.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    checkpoint.add_argument("--f", type=float, default=0.01, help="seconds of a stage's forward of one micro-batch")
    checkpoint.add_argument("--megabytes", type=int, default=8, help="MiB that each rank saves")
    checkpoint.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    checkpoint.add_argument("--steps", type=int, default=60, help="steps per repeat")
    checkpoint.add_argument("--repeats", type=int, default=5, help="alternating repeats, whose median is reported")

    tracking = add("tracking", run_tracking)
    tracking.add_argument("--ranks", type=int, default=8, help="ranks, one stage each")
    tracking.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    tracking.add_argument("--f", type=float, default=0.01, help="seconds of one stage's forward of one micro-batch")
    tracking.add_argument("--steps", type=int, default=40, help="timed steps of each part of a round")
    tracking.add_argument("--repeats", type=int, default=10, help="rounds in which tracked and untracked alternate")

    protection = add("protection", run_protection)
    protection.add_argument("--ranks", type=int, default=8, help="ranks, one stage each")
    protection.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    protection.add_argument("--f", type=float, default=0.011, help="seconds of one stage's forward of one micro-batch")
    protection.add_argument("--steps", type=int, default=16, help="timed steps of each part of a round")
    protection.add_argument("--repeats", type=int, default=24, help="rounds in which the systems alternate")

    link = add("link", run_link)
    link.add_argument("--stages", type=int, default=4, help="ranks, one stage and one host each")
    link.add_argument("--microbatches", type=int, default=4, help="micro-batches per step")
    link.add_argument("--f", type=float, default=0.01, help="seconds of one stage's forward of one micro-batch")
    link.add_argument("--kibibytes", type=int, default=256, help="size of a message")
    link.add_argument("--delays", type=numbers, default=(0.002, 0.005, 0.01, 0.02), help="seconds, one way")
    link.add_argument("--megabits", type=numbers, default=(400, 200, 100), help="per second, of a link")
    link.add_argument("--repeats", type=int, default=2, help="rounds in which the links alternate")
    link.add_argument("--seconds", type=float, default=0.5, help="about how long a system runs in each round")
    link.add_argument("--out", type=Path, help="file for the figure")

    growth = add("growth", run_growth)
    growth.add_argument("--ranks", type=whole_numbers, default=(8, 64, 256), help="numbers of ranks, a process each")

    scale = add("scale", run_scale)
    scale.add_argument("--stages", type=whole_numbers, default=(4, 8, 16, 64, 256, 1024), help="numbers of stages")
    scale.add_argument("--microbatches", type=int, default=8, help="micro-batches")
    return parser


def main() -> None:
    """Run the chosen benchmark, print its table and write its rows."""
    parser = build_parser()
    options = parser.parse_args()
    try:
        rows = options.run(options, Console() if Console().is_terminal else Console(width=130))
        if options.json:
            write_rows(rows, options.json)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
