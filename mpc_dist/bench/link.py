"""`bench.py link`: step time of each horizon when the links between hosts are slow, compute emulated by sleeping.

Every stage is on a host of its own (a network namespace), so every message crosses a link. The same processes go
through all links and horizons, in turns; the simulator's prediction for that link stands beside what was measured.

    parent: limits the links, writes a line to each rank     rank: measures every system, answers with a line
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

from mpc_dist.bench.emulate import Pace, SleepingBlock, cheap_loss, measure_overshoot
from mpc_dist.bench.hosts import Network, why_not
from mpc_dist.bench.rows import Row
from mpc_dist.bench.schedule import OURS, WARM_UP_STEPS, parse_windows, time_steps
from mpc_dist.readout import Identity
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.schedule import Costs, Layout, build_schedule, lay_out, simulate
from mpc_dist.validation import check_real, check_whole

TIMEOUT = timedelta(seconds=60)
PORT = "29400"
OVERHEAD = 3e-4
"""Seconds that gloo takes for a message on an unlimited link."""
SYSTEMS = (
    ("sliding:1", False, "h = 1"),
    ("tumbling:2", True, "tumbling 2"),
    ("sliding:2", True, "h = 2"),
    ("backprop", True, "back-propagation, split"),
    ("backprop", False, "back-propagation, 1F1B"),
)
"""Windows, whether backwards are split, and what the figure calls it."""


@dataclass(frozen=True)
class Link:
    """What every way from one host to another is like."""

    delay: float = 0.0
    """Seconds from host to host."""
    megabits: float | None = None
    """Per second; None: as many as the machine can."""


@dataclass(frozen=True)
class LinkSetting:
    """What is measured."""

    num_stages: int
    num_microbatches: int
    seconds: float
    """f: one stage's forward of one micro-batch."""
    kibibytes: int
    """Of a message."""
    delays: tuple[float, ...]
    """Seconds, each on a link of unlimited bandwidth."""
    megabits: tuple[float, ...]
    """Each on a link without delay."""
    repeats: int
    repeat_seconds: float
    """About how long each system runs in each repeat."""

    def __post_init__(self) -> None:
        check_whole("--stages", self.num_stages, minimum=2, maximum=64)
        check_whole("--microbatches", self.num_microbatches, minimum=1)
        check_whole("--kibibytes", self.kibibytes, minimum=1)
        check_whole("--repeats", self.repeats, minimum=1)
        check_real("--f", self.seconds, minimum=0.0001)
        for delay in self.delays:
            check_real("--delays", delay, minimum=0)
        for number in self.megabits:
            check_real("--megabits", number, minimum=0.1)

    @property
    def links(self) -> tuple[Link, ...]:
        """The unlimited one, then each limit alone."""
        slow = [*(Link(delay=one) for one in self.delays if one), *(Link(megabits=one) for one in self.megabits)]
        return (Link(), *slow)


def bench_link(setting: LinkSetting, on_progress: Callable[[], None] = lambda: None) -> list[Row]:
    """A row for each link and system."""
    if reason := why_not():
        raise ValueError(f"stages on hosts of their own cannot be had: {reason}")
    times: dict[tuple[Link, int], list[float]] = {}
    with Network(setting.num_stages) as network, tempfile.TemporaryFile("w+") as errors:
        ranks = _start(network, setting, errors)
        for _ in range(setting.repeats):
            for link in setting.links:
                network.limit(delay=link.delay, rate=None if link.megabits is None else 1e6 * link.megabits)
                answers = _ask(ranks, link, errors)
                for index, found in enumerate(zip(*answers, strict=True)):
                    times.setdefault((link, index), []).append(max(found))  # of the slowest rank
                on_progress()
    return [_row(setting, link, index, found) for (link, index), found in times.items()]


def _start(network: Network, setting: LinkSetting, errors: IO[str]) -> "list[subprocess.Popen[str]]":
    command = [sys.executable, "-m", __name__, json.dumps(asdict(setting)), str(measure_overshoot())]
    given = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    first = network.hosts[0].name
    given |= {"MASTER_ADDR": first, "MASTER_PORT": PORT, "WORLD_SIZE": str(setting.num_stages), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return [
        network.start(host, command, env={**given, "RANK": str(host.number), "LOCAL_RANK": "0"}, **pipes)
        for host in network.hosts
    ]


def _ask(ranks: "Sequence[subprocess.Popen[str]]", link: Link, errors: IO[str]) -> list[list[float]]:
    """The step time of every system, from each rank."""
    answers = []
    try:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(asdict(link)) + "\n")
            rank.stdin.flush()
        for rank in ranks:
            assert rank.stdout is not None
            answers.append(json.loads(rank.stdout.readline()))
    except (OSError, ValueError) as error:
        errors.seek(0)
        raise RuntimeError(f"a rank failed at {link}:\n{errors.read()}") from error
    return answers


def _row(setting: LinkSetting, link: Link, index: int, times: Sequence[float]) -> Row:
    windows, split, _ = SYSTEMS[index]
    predicted = _predict(setting, link, index)
    row = Row.of_times(
        times,
        system=OURS,
        windows=windows,
        split=split,
        stages=setting.num_stages,
        microbatches=setting.num_microbatches,
    )
    row.extra.update(
        {
            "delay ms": 1000 * link.delay,
            "Mbit/s": link.megabits or "",
            "units": row.step_seconds / setting.seconds,
            "simulated": predicted / setting.seconds,
            "measured/simulated": row.step_seconds / predicted,
        }
    )
    return row


def _layout(setting: LinkSetting, index: int) -> Layout:
    return lay_out(parse_windows(SYSTEMS[index][0], setting.num_stages), [1] * setting.num_stages)


def _costs(setting: LinkSetting, link: Link) -> Costs:
    each = (setting.seconds,) * setting.num_stages
    return Costs(
        *(each, each, each),
        latency=OVERHEAD + link.delay,
        bandwidth=float("inf") if link.megabits is None else 1e6 * link.megabits / 8,
        message_bytes=(1024.0 * setting.kibibytes,) * setting.num_stages,
    )


def _predict(setting: LinkSetting, link: Link, index: int) -> float:
    layout, costs = _layout(setting, index), _costs(setting, link)
    schedule = build_schedule(layout, setting.num_microbatches, split=SYSTEMS[index][1], costs=costs)
    return simulate(schedule, layout, costs, num_steps=20).step_time


def _measure(mesh: Mesh, setting: LinkSetting, link: Link, index: int, overshoot: float) -> float:
    """This rank's median step time."""
    width = 256 * setting.kibibytes  # float32
    pipeline = Pipeline(
        mesh,
        _layout(setting, index),
        build_block=lambda _: SleepingBlock(Pace(setting.seconds, overshoot), width),
        build_readout=lambda _: Identity(),
        loss=cheap_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        num_microbatches=setting.num_microbatches,
        split=SYSTEMS[index][1],
        costs=_costs(setting, link),
        timeout=TIMEOUT,
    )
    batch = torch.zeros(setting.num_microbatches, width), torch.zeros(setting.num_microbatches, width)

    def step() -> None:
        pipeline.step(*batch)

    dist.barrier()
    for _ in range(WARM_UP_STEPS):
        step()
    # All ranks must make the same number of steps; the first ranks run ahead in some of them.
    num_steps = min(60, max(10, round(setting.repeat_seconds / _predict(setting, link, index))))
    seconds = time_steps(step, num_steps)
    pipeline.close()
    dist.barrier()
    return seconds


def _serve(setting: LinkSetting, overshoot: float) -> None:
    """What a rank does: a line with a link in, a line with the step time of every system out."""
    torch.set_num_threads(1)
    launch = Launch.from_environment()
    mesh = build_mesh(launch, num_stages=setting.num_stages, timeout=TIMEOUT)
    for line in sys.stdin:
        link = Link(**json.loads(line))
        times = [_measure(mesh, setting, link, index, overshoot) for index in range(len(SYSTEMS))]
        sys.stdout.write(json.dumps(times) + "\n")
        sys.stdout.flush()


def draw_link(rows: Sequence[Row], setting: LinkSetting) -> Figure:
    """Step time against delay and against bandwidth: measured as points, simulated as lines."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    bits = 8 * 1024 * setting.kibibytes
    for color, (windows, split, label) in enumerate(SYSTEMS):
        own = [row for row in rows if (row.windows, row.split) == (windows, split)]
        delayed = [(row.extra["delay ms"], row) for row in own if not row.extra["Mbit/s"]]
        narrow = [(bits / row.extra["Mbit/s"] / 1000, row) for row in own if row.extra["Mbit/s"]]
        for panel, points in zip(axes, (delayed, [(0.0, delayed[0][1]), *narrow]), strict=True):
            points.sort(key=lambda point: point[0])
            places = [place for place, _ in points]
            panel.plot(places, [row.extra["simulated"] for _, row in points], color=f"C{color}", lw=1)
            measured = [row.extra["units"] for _, row in points]
            panel.plot(places, measured, "o", color=f"C{color}", ms=5, label=label)
    axes[0].set_xlabel("delay of a link, one way (ms)")
    axes[1].set_xlabel(f"time of a message of {setting.kibibytes} KiB on a link (ms)")
    axes[0].set_ylabel(f"step time (f = {1000 * setting.seconds:g} ms, a stage's forward)")
    axes[0].set_title("delay, unlimited bandwidth", fontsize=10)
    axes[1].set_title("limited bandwidth, no delay", fontsize=10)
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylim(bottom=0)
    axes[0].legend(fontsize=8, title="points measured, lines simulated", title_fontsize=8)
    figure.suptitle(
        f"{setting.num_stages} stages on {setting.num_stages} hosts, {setting.num_microbatches} micro-batches",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    _serve(LinkSetting(**json.loads(sys.argv[1])), float(sys.argv[2]))
