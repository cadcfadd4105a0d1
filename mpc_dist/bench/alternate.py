"""Systems that the same ranks run in turns, so that whatever else the machine does hits all alike, and their ratios."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from mpc_dist.bench.emulate import Pace, SleepingBlock, cheap_loss
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity
from mpc_dist.runtime.mesh import Mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import Costs, lay_out
from mpc_dist.validation import check_whole
from mpc_dist.windows import sliding

HOST = "127.0.0.1"
CONFIDENCE = 0.95

Key = TypeVar("Key")


@dataclass(frozen=True)
class AlternatingSetting:
    """What every rank measures, with a horizon of one stage."""

    num_ranks: int
    num_microbatches: int
    seconds: float
    """f: one stage's forward of one micro-batch."""
    num_steps: int
    """Timed steps of each part of a round."""
    repeats: int
    """Rounds, each with a part of every system."""

    def __post_init__(self) -> None:
        check_whole("--ranks", self.num_ranks, minimum=2)
        check_whole("--microbatches", self.num_microbatches, minimum=1)
        check_whole("--steps", self.num_steps, minimum=1)
        check_whole("--repeats", self.repeats, minimum=1)


def build_emulated(
    mesh: Mesh,
    setting: AlternatingSetting,
    overshoot: float,
    *,
    width: int,
    timeout: timedelta,
    options: StageOptions,
) -> Pipeline:
    """A pipeline of one sleeping block per rank."""
    return Pipeline(
        mesh,
        lay_out(sliding(setting.num_ranks, 1), [1] * setting.num_ranks),
        build_block=lambda _: SleepingBlock(Pace(setting.seconds, overshoot), width),
        build_readout=lambda _: Identity(),
        loss=cheap_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        num_microbatches=setting.num_microbatches,
        costs=Costs.uniform([setting.seconds] * setting.num_ranks),
        options=options,
        timeout=timeout,
    )


def take_turns(systems: Sequence[Key], repeats: int) -> Iterator[tuple[int, Key]]:
    """The round and system of every part; which comes first alternates too."""
    for repeat in range(repeats):
        for system in systems if repeat % 2 == 0 else reversed(systems):
            yield repeat, system


def compare(
    ranks: Sequence[Mapping[Key, Sequence[float]]], systems: Mapping[Key, str], setting: AlternatingSetting
) -> list[Row]:
    """A row per system, by its name, with its ratio to the first; `ranks` are every rank's step times by round."""
    # A part lasts as long as it does on its slowest rank.
    times = {key: [max(found) for found in zip(*(rank[key] for rank in ranks), strict=True)] for key in systems}
    plain = times[next(iter(systems))]
    rows = []
    for key, name in systems.items():
        ratios = [own / first for own, first in zip(times[key], plain, strict=True)]
        bounds = bound_median(ratios)
        rows.append(
            Row.of_times(
                times[key],
                system=name,
                windows="sliding:1",
                split=False,
                stages=setting.num_ranks,
                microbatches=setting.num_microbatches,
                extra={
                    "ratio of medians": round(statistics.median(times[key]) / statistics.median(plain), 4),
                    "median of the rounds' ratios": round(statistics.median(ratios), 4),
                    "95 % from": None if bounds is None else round(bounds[0], 4),
                    "to": None if bounds is None else round(bounds[1], 4),
                },
            )
        )
    return rows


def bound_median(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval that holds the median with 95 %, whatever the distribution; None with fewer than 6 values.

    Each value is below the median like the toss of a coin, so that the binomial distribution tells how many of the
    smallest and of the largest can be left out.
    """
    number, left_out = len(values), 0
    below = 0.0
    while True:
        below += math.comb(number, left_out) / 2**number
        if below > (1 - CONFIDENCE) / 2:
            break
        left_out += 1
    ordered = sorted(values)
    return (ordered[left_out - 1], ordered[number - left_out]) if left_out else None
