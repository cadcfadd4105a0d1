"""Within a step the host never waits for its device: whole steps of the real pipeline on a device that tells.

A rank runs alone, among stand-ins: see `alone`. Its batch is the host's, as in training; so are its counts of labels.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mpc_dist.readout import Shared
from mpc_dist.runtime import microbatch
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.loss_scale import LossScale
from mpc_dist.runtime.mesh import Launch, build_mesh, leave
from mpc_dist.runtime.microbatch import Shares
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import lay_out
from mpc_dist.windows import Windows, backprop, sliding
from tests.nccl.alone import Others, alone
from tests.nccl.device import DEVICE_TYPE, Device, elsewhere
from tests.nccl.record import recording

T, WIDTH, M, NUM_STEPS = 3, 4, 2, 2
PARTITION = (1, 1, 1)
WINDOWS = {
    "h = 1": sliding(T, 1),
    "h = 2": sliding(T, 2),
    "backprop": backprop(T),
}
OPTIONS = {
    "plain": (StageOptions(), 0),
    "clipped": (StageOptions(clip_norm=0.1), 0),
    "one norm for all": (StageOptions(clip_norm=0.1, clip_scope="global"), 0),
    "recomputed": (StageOptions(checkpoint=True), 0),
    "stop": (StageOptions(on_nonfinite="stop"), 1),
    "skip": (StageOptions(on_nonfinite="skip"), 1),
    "scaled": (StageOptions(loss_scale=LossScale(2.0)), 1),
}
"""And how often a step may read: at the update, what the guard has seen, with the agreement of all ranks."""


def build(rank: int, replicas: int, windows: Windows, options: StageOptions, *, split: bool, shared: bool) -> Pipeline:
    def make_block(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))

    head = nn.Linear(WIDTH, WIDTH)
    timeout = timedelta(seconds=60)
    mesh = build_mesh(
        Launch(rank, len(PARTITION) * replicas, rank), num_stages=len(PARTITION), num_replicas=replicas, timeout=timeout
    )
    return Pipeline(
        replace(mesh, device=torch.device(DEVICE_TYPE, 0)),
        lay_out(windows, PARTITION),
        build_block=make_block,
        build_readout=lambda s: Shared(head) if shared and s < T else nn.Linear(WIDTH, WIDTH),
        loss=cross_entropy,
        optimizer=torch.optim.AdamW,
        num_microbatches=M,
        split=split,
        options=options,
        timeout=timeout,
    )


def count_waits(pipeline: Pipeline, device: Device) -> list[list[str]]:
    """For what the host waits in each step but the first, which connects the ranks."""
    labels = torch.randint(0, WIDTH, (2 * M,), generator=torch.Generator().manual_seed(0))
    labels[:3] = -100  # holes: the first micro-batch has no label
    inputs, found = torch.ones(2 * M, WIDTH), []
    for _ in range(NUM_STEPS):
        device.waits.clear()
        pipeline.step(inputs, labels, meanwhile=lambda: pipeline.load(inputs, labels))
        found.append([*device.waits])
    return found[1:]


Case = tuple[str, str, bool, bool]
"""Names of windows and options; whether backwards are split, and heads shared."""
CASES: list[Case] = [
    (*names, split, not split) for names in itertools.product(WINDOWS, OPTIONS) for split in (False, True)
]


def step_everywhere(_: int, replicas: int, cases: Sequence[Case], fault: str = "") -> dict[object, list[list[str]]]:
    """By case and rank."""
    found: dict[object, list[list[str]]] = {}
    leave()  # the group of this process
    FAULTS[fault]()
    with elsewhere() as device:
        for (name, option, split, shared), stage in itertools.product(cases, range(len(PARTITION))):
            rank, num_ranks = stage * replicas, len(PARTITION) * replicas
            answer = Others((2, WIDTH), num_shared=1 if shared else 0).answer
            with alone(rank, num_ranks), recording(answer):
                pipeline = build(rank, replicas, WINDOWS[name], OPTIONS[option][0], split=split, shared=shared)
                found[name, option, split, shared, rank] = count_waits(pipeline, device)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_waits_for_its_device_at_most_at_the_update(replicas):
    (found,) = run_local_ranks(step_everywhere, 1, replicas, CASES)
    wrong = {case: waits for case, waits in found.items() if any(len(one) != OPTIONS[case[1]][1] for one in waits)}
    assert wrong == {}


def read_shares() -> None:
    of = Shares.of
    Shares.of = lambda self, microbatch: float(of(self, microbatch))  # type: ignore[method-assign]


def copy_without_pins() -> None:
    microbatch._move = lambda part, device: part.to(device)


def read_norms() -> None:
    clip = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda *given: float(clip(*given))


FAULTS = {"": lambda: None, "shares": read_shares, "copies": copy_without_pins, "norms": read_norms}


@pytest.mark.parametrize("fault", ["shares", "copies", "norms"])
def test_a_wait_in_a_step_is_seen(fault):
    (found,) = run_local_ranks(step_everywhere, 1, 2, [("h = 1", "clipped", False, False)], fault)
    assert any(waits for by_step in found.values() for waits in by_step)
