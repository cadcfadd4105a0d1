"""The real pipeline's order of calls does not hang on devices as strict as NCCL's may be.

Ranks run on gloo, in NCCL's manners; what each asks of its device is recorded and then run by the strict model, with a
wait for the whole device at every place of every rank in turn.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch

from mpc_dist.readout import Shared
from mpc_dist.runtime import pipeline as pipelines
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.transport import NCCL, Manners
from mpc_dist.schedule import lay_out
from mpc_dist.windows import Windows, backprop, cumulative, sliding, tumbling
from tests.examples import build_dense_chain
from tests.nccl.model import Devices, HangError
from tests.nccl.record import Recording, join, recording

T = 6
TIMEOUT = timedelta(seconds=60)
WINDOWS = {
    "h = 1": sliding(T, 1),
    "h = 2": sliding(T, 2),
    "h = 3": sliding(T, 3),
    "h = 5": sliding(T, 5),
    "backprop": backprop(T),
    "tumbling 2": tumbling(T, 2),
    "tumbling 3": tumbling(T, 3),
    "cumulative 2": cumulative(T, 2),
}
PARTITIONS = [(3, 3), (1, 5), (2, 2, 2), (1, 4, 1), (2, 1, 2, 1), (1, 1, 1, 1, 1, 1)]
Case = tuple[str, int, bool]
"""The name of windows, the number of micro-batches, and whether backwards are split."""


def build(
    rank: int,
    partition: Sequence[int],
    windows: Windows,
    *,
    replicas: int = 1,
    is_shared: bool = False,
    options: StageOptions | None = None,
    **settings: object,
) -> tuple[Pipeline, torch.Tensor, torch.Tensor]:
    chain, inputs, labels = build_dense_chain([2] * (T + 1))
    inputs, labels = (torch.cat([part] * 2) for part in (inputs, labels))
    head = chain.readouts[str(T)]
    launch = Launch(rank, len(partition) * replicas, rank)
    pipeline = Pipeline(
        build_mesh(launch, num_stages=len(partition), num_replicas=replicas, timeout=TIMEOUT),
        lay_out(windows, partition),
        build_block=lambda t: chain.blocks[t],
        build_readout=lambda s: Shared(head) if is_shared and s < T else chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        options=options,
        timeout=TIMEOUT,
        **settings,
    )
    return pipeline, inputs, labels


def record_steps(
    rank: int, partition: Sequence[int], cases: Sequence[Case], manners: Manners = NCCL
) -> list[Recording]:
    """Two steps of each case."""
    pipelines.manners_of = lambda _device: manners
    found = []
    for name, num_microbatches, split in cases:
        with recording() as own:
            settings = {"num_microbatches": num_microbatches, "split": split}
            pipeline, inputs, labels = build(rank, partition, WINDOWS[name], **settings)
            for _ in range(2):
                pipeline.step(inputs, labels)
            pipeline.close()
        found.append(own)
    return found


def find_hangs(by_rank: Sequence[Sequence[Recording]], cases: Sequence[object], **rules: bool) -> dict[object, str]:
    """What is said of each case that hangs, with a wait for the whole device at every place of every rank in turn."""
    hung = {}
    for case, recordings in zip(cases, zip(*by_rank, strict=True), strict=True):
        calls, members = join(recordings)
        try:
            Devices(calls, members, **rules).run()
            for rank in range(len(calls)):
                Devices(calls, members, **rules).run_with_device_wait(rank)
        except HangError as error:
            hung[case] = str(error)
    return hung


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_steps(partition):
    cases = list(itertools.product(WINDOWS, (1, 2, 4), (False, True)))
    by_rank = run_local_ranks(record_steps, len(partition), partition, cases)
    assert find_hangs(by_rank, cases) == {}


@pytest.mark.parametrize("posted_ahead", [1, 2])
def test_receives_that_are_posted_ahead_hang_with_a_wait_for_the_device(posted_ahead):
    partition = (2, 2, 2)
    cases = list(itertools.product(["h = 1", "h = 3", "backprop"], (2, 4), (False, True)))
    manners = Manners(posted_ahead, host_waits=False)
    by_rank = run_local_ranks(record_steps, len(partition), partition, cases, manners)
    hung = find_hangs(by_rank, cases)
    assert {case[0] for case in hung} == {"h = 3", "backprop"}  # without adjoints nothing waits for a later call
    for recordings in zip(*by_rank, strict=True):
        Devices(*join(recordings)).run()  # without such a wait they end


def test_one_hardware_queue_hangs():
    """CUDA_DEVICE_MAX_CONNECTIONS=1: a kernel behind a receive that waits for it never starts."""
    partition = (2, 2, 2)
    cases = list(itertools.product(["h = 3", "backprop"], (4,), (False, True)))
    by_rank = run_local_ranks(record_steps, len(partition), partition, cases, Manners(2, host_waits=False))
    for recordings in zip(*by_rank, strict=True):
        with pytest.raises(HangError):
            Devices(*join(recordings), one_queue=True).run()


Scenario = Callable[[int], None]


def train_and_evaluate(pipeline: Pipeline, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    for _ in range(2):
        pipeline.step(inputs, labels)
        pipeline.evaluate(inputs[:5], labels[:5])


def change_often(pipeline: Pipeline, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    for name in ("h = 1", "tumbling 3", "backprop", "h = 2"):
        pipeline.change_windows(WINDOWS[name])
        pipeline.step(inputs, labels)


def probe_angles(pipeline: Pipeline, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    pipeline.step(inputs, labels)
    pipeline.measure_angles([(inputs, labels)])
    pipeline.step(inputs, labels)


def check_replicas(pipeline: Pipeline, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    for _ in range(2):
        pipeline.step(inputs, labels)
        pipeline.check_replicas()


DOINGS = {one.__name__: one for one in (train_and_evaluate, change_often, probe_angles, check_replicas)}
OPTIONS = {
    "plain": StageOptions(),
    "one norm for all": StageOptions(clip_norm=0.1, clip_scope="global"),
    "steps that may be skipped": StageOptions(on_nonfinite="skip"),
}


def record_doings(rank: int, partition: Sequence[int], replicas: int, cases: Sequence[tuple]) -> list[Recording]:
    pipelines.manners_of = lambda _device: NCCL
    found = []
    for name, doing, option, is_shared in cases:
        with recording() as own:
            settings = {"replicas": replicas, "is_shared": is_shared, "options": OPTIONS[option]}
            pipeline, inputs, labels = build(rank, partition, WINDOWS[name], num_microbatches=4, **settings)
            DOINGS[doing](pipeline, inputs, labels)
            pipeline.close()
        found.append(own)
    return found


@pytest.mark.parametrize(("partition", "replicas"), [((2, 2, 2), 1), ((2, 1, 2, 1), 1), ((3, 3), 2)], ids=str)
def test_everything_else(partition, replicas):
    cases = list(itertools.product(["h = 1", "h = 2", "backprop"], DOINGS, OPTIONS, (False, True)))
    by_rank = run_local_ranks(record_doings, len(partition) * replicas, partition, replicas, cases, timeout=300)
    assert find_hangs(by_rank, cases) == {}
