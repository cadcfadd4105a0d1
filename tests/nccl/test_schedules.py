"""No schedule hangs: the real pipeline's calls on every rank, over windows, partitions, micro-batches, halves, caps.

Each rank is recorded alone, which is quick; that this tells what ranks do among others is shown on gloo. Then the
strict model runs the calls, with a wait for the whole device at every place of every rank in turn.
"""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime import pipeline as pipelines
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.transport import NCCL, Manners
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, cumulative, sliding, tumbling
from tests.nccl.alone import Others, alone
from tests.nccl.model import Call, Devices
from tests.nccl.record import Recording, join, recording

T, NUM_SAMPLES = 6, 12
TIMEOUT = timedelta(seconds=60)
WINDOWS = {
    **{f"sliding {h}": sliding(T, h) for h in range(1, T)},
    "backprop": backprop(T),
    **{f"tumbling {g}": tumbling(T, g) for g in (2, 3)},
    **{f"cumulative {h}": cumulative(T, h) for h in (2, 3)},
    "sliding 2, every other anchor": sliding(T, 2, [2, 4, 6]),
    "sliding 3, every third anchor": sliding(T, 3, [3, 6]),
}


class Case(NamedTuple):
    """A schedule, by how it is built."""

    partition: tuple[int, ...]
    windows: str
    num_microbatches: int
    split: bool
    cap: int | None


class Scale(nn.Module):
    """The least that can be trained: the order of calls does not depend on what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, state: Tensor) -> Tensor:
        return state * self.weight


class KeepGradients:
    """An optimizer that does nothing."""

    def __init__(self, _: list[nn.Parameter]) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def step(self) -> None:
        """Nothing."""

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Nothing."""


# The same on every rank.
build_once = cache(build_schedule)
BLOCKS = [Scale() for _ in range(T)]


def list_cases(num_ranks: int, caps: Sequence[int | None] = (None,)) -> list[Case]:
    """All ways to share the blocks among so many ranks, with schedules that differ from each other."""
    cuts = itertools.combinations(range(1, T), num_ranks - 1)
    partitions = [tuple(b - a for a, b in itertools.pairwise((0, *inner, T))) for inner in cuts]
    found: dict[object, Case] = {}
    for case in itertools.starmap(Case, itertools.product(partitions, WINDOWS, (1, 2, 4), (False, True), caps)):
        layout = lay_out(WINDOWS[case.windows], case.partition)
        schedule = build_once(layout, case.num_microbatches, split=case.split, cap=case.cap, costs=None)
        found.setdefault((case.partition, case.windows, schedule), case)
    return list(found.values())


def train(mesh: Mesh, case: Case) -> None:
    """Two steps."""
    for block in BLOCKS:
        block.zero_grad()
    pipeline = Pipeline(
        mesh,
        lay_out(WINDOWS[case.windows], case.partition),
        build_block=BLOCKS.__getitem__,
        build_readout=lambda _: Identity(),
        loss=mean_squared_error,
        optimizer=KeepGradients,  # type: ignore[arg-type]
        num_microbatches=case.num_microbatches,
        split=case.split,
        cap=case.cap,
        timeout=TIMEOUT,
    )
    batch = torch.ones(NUM_SAMPLES, 1)
    for _ in range(2):
        pipeline.step(batch, batch)
    pipeline.close()


def record(rank: int, cases: Sequence[Case], is_alone: bool, manners: Manners = NCCL) -> list[list[Recording]]:
    """What a rank does to meet the others, and then in each case."""
    num_ranks = len(cases[0].partition)
    found = []
    # The transport asks what manners are wanted of the device's type, which is the CPU's here.
    with (
        patch.object(pipelines, "manners_of", lambda _: manners),
        patch.object(pipelines, "build_schedule", build_once),
    ):
        answer = Others((NUM_SAMPLES, 1)).answer if is_alone else None
        with recording(answer) as first:
            mesh = build_mesh(Launch(rank, num_ranks, rank), num_stages=num_ranks, timeout=TIMEOUT)
        for case in cases:
            answer = Others((NUM_SAMPLES // case.num_microbatches, 1)).answer if is_alone else None
            with recording(answer) as own:
                train(mesh, case)
            found.append([first, own])
    return found


def record_alone(cases: Sequence[Case], manners: Manners = NCCL) -> list[list[list[Recording]]]:
    """The same of every rank, one after another in this process; all cases have as many."""
    by_rank = []
    for rank in range(len(cases[0].partition)):
        with alone(rank, len(cases[0].partition)):
            by_rank.append(record(rank, cases, True, manners))
    return by_rank


def run_strictly(parts: Sequence[Sequence[Recording]], *, with_device_waits: bool = True, **rules: bool) -> None:
    """Let the model run a case, of whose ranks each gives its parts."""
    firsts, owns = (join(recordings) for recordings in zip(*parts, strict=True))
    calls: list[list[Call]] = [[*one, *other] for one, other in zip(firsts[0], owns[0], strict=True)]
    members = firsts[1] | owns[1]
    Devices(calls, members, **rules).run()
    for rank in range(len(calls) if with_device_waits else 0):
        Devices(calls, members, **rules).run_with_device_wait(rank)


def check(cases: Sequence[Case]) -> None:
    for parts in zip(*record_alone(cases), strict=True):
        run_strictly(parts)


@pytest.mark.parametrize("num_ranks", range(2, T + 1))
def test_every_schedule(num_ranks):
    check(list_cases(num_ranks))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", range(2, T + 1))
def test_every_schedule_that_a_cap_changes(num_ranks):
    without = set(list_cases(num_ranks))
    check([case for case in list_cases(num_ranks, (None, 1)) if case not in without])


def test_they_are_at_least_2000():
    assert sum(len(list_cases(num_ranks)) for num_ranks in range(2, T + 1)) >= 2000


def without_names(recordings: Sequence[Recording]) -> list[Call]:
    """The calls, with members in the place of groups' names, and numbers from 0 in the order of transfers."""
    numbers: dict[int, int] = {}
    members = {name: ranks for one in recordings for name, ranks in one.members.items()}
    order = {name: place for place, name in enumerate(members)}
    return [
        call._replace(
            number=numbers.setdefault(call.number, len(numbers)),
            group=f"{order[call.group]}: {members[call.group]}" if call.group else "",
        )
        for one in recordings
        for call in one.calls
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_alone_does_what_it_does_among_others(num_ranks):
    cases = list_cases(num_ranks)[::23]
    among_others = run_local_ranks(record, num_ranks, cases, False)
    for rank, found in enumerate(record_alone(cases)):
        for case, own, true in zip(cases, found, among_others[rank], strict=True):
            assert without_names(own) == without_names(true), (rank, case)
