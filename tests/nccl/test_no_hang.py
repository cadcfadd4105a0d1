"""Whatever else ranks do with each other is in one order on all of them, and does not hang on the strict model.

As in `test_schedules`, each rank is recorded alone; whole training runs are recorded on gloo.
"""

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mpc_dist.readout import Shared
from mpc_dist.runtime import pipeline as pipelines
from mpc_dist.runtime.executor import StepRecord
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import Stage, StageOptions
from mpc_dist.runtime.transport import NCCL
from mpc_dist.schedule import lay_out
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics
from mpc_dist.windows import Windows, backprop, sliding, tumbling
from tests.examples import build_dense_chain
from tests.nccl.alone import Others, alone
from tests.nccl.model import Devices, HangError
from tests.nccl.record import Recording, join, recording
from tests.nccl.test_schedules import without_names
from tests.training.faulty import SMALL
from tests.training.local import parse

T, NUM_SAMPLES = 6, 8
TIMEOUT = timedelta(seconds=60)
WINDOWS = {"h = 1": sliding(T, 1), "h = 2": sliding(T, 2), "tumbling 3": tumbling(T, 3), "backprop": backprop(T)}


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
    inputs, labels = (torch.cat([part] * (NUM_SAMPLES // len(part))) for part in (inputs, labels))
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


class Memory:
    """A checkpoint in this process."""

    def __init__(self, tensors: Mapping[str, Tensor], num_replicas: int) -> None:
        self._tensors, self.num_replicas = tensors, num_replicas
        self.described = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        for name, tensor in into.items():
            tensor.copy_(self._tensors[name])


def save_and_go_back(pipeline: Pipeline, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    for step in range(2):
        pipeline.step(inputs, labels)
        with pipeline.with_saved_buffers():
            kept = pipeline.collect_state()
        # Of the replicas, each keeps a part of the weights: here it has them all.
        weights = {name: parameter.detach().clone() for name, parameter in pipeline.named_parameters().items()}
        pipeline.restore_state(Memory(weights | kept, pipeline.mesh.num_replicas), step=step)


DOINGS = {
    one.__name__: one for one in (train_and_evaluate, change_often, probe_angles, check_replicas, save_and_go_back)
}
OPTIONS = {
    "plain": StageOptions(),
    "one norm for all": StageOptions(clip_norm=0.1, clip_scope="global"),
    "steps that may be skipped": StageOptions(on_nonfinite="skip", clip_norm=0.1, clip_scope="global"),
}
M = 4
Case = tuple[str, str, str, bool]
"""Names of windows, doing and options; whether the head is shared."""
CASES: list[Case] = list(itertools.product(["h = 2", "backprop"], DOINGS, OPTIONS, (False, True)))


def record_doings(
    rank: int, partition: Sequence[int], replicas: int, cases: Sequence[Case], is_alone: bool
) -> list[Recording]:
    found = []
    with patch.object(pipelines, "manners_of", lambda _: NCCL):
        for name, doing, option, is_shared in cases:
            answer = Others((NUM_SAMPLES // M, 2), num_shared=1 if is_shared else 0).answer if is_alone else None
            with recording(answer) as own:
                settings = {"replicas": replicas, "is_shared": is_shared, "options": OPTIONS[option]}
                pipeline, inputs, labels = build(rank, partition, WINDOWS[name], num_microbatches=M, **settings)
                DOINGS[doing](pipeline, inputs, labels)
                pipeline.close()
            found.append(own)
    return found


def record_alone(partition: Sequence[int], replicas: int, cases: Sequence[Case]) -> list[list[Recording]]:
    by_rank = []
    for rank in range(len(partition) * replicas):
        with alone(rank, len(partition) * replicas):
            by_rank.append(record_doings(rank, partition, replicas, cases, True))
    return by_rank


@pytest.mark.parametrize(("partition", "replicas"), [((2, 2, 2), 1), ((2, 1, 2, 1), 1), ((3, 3), 2)], ids=str)
def test_everything_else(partition, replicas):
    assert find_hangs(record_alone(partition, replicas, CASES), CASES) == {}


def test_a_rank_alone_does_all_that_it_does_among_others():
    cases = CASES[::7]
    among_others = run_local_ranks(record_doings, 4, (3, 3), 2, cases, False)
    for rank, found in enumerate(record_alone((3, 3), 2, cases)):
        for case, own, true in zip(cases, found, among_others[rank], strict=True):
            assert without_names([own]) == without_names([true]), (rank, case)


def test_collectives_in_another_order_on_one_rank_hang():
    """It takes part in the norm before it agrees on the update: each on a communicator of its own."""
    partition, cases = (2, 2, 2), [("h = 2", "train_and_evaluate", "steps that may be skipped", True)]
    by_rank = record_alone(partition, 1, cases)
    update = Stage._update

    def send_head_first(self: Stage, record: StepRecord) -> None:
        self._shared_head.start()
        with patch.object(self._shared_head, "start", lambda: None):
            update(self, record)

    with patch.object(Stage, "_update", send_head_first):
        odd = record_alone(partition, 1, cases)
    assert find_hangs(by_rank, cases) == find_hangs(odd, cases) == {}
    assert find_hangs([by_rank[0], odd[1], by_rank[2]], cases) != {}


def record_training(rank: int, folder: str, steps: int) -> Recording:
    layout = "--parallel.stages 2 --data_parallel.degree 2 --batch_size 6 --checkpoints.every 2 --horizon.mode adaptive"
    rules = "--horizon.every 2 --training.eval_every 2 --data_parallel.check_every 2 --training.clip_norm 1"
    more = f"--training.clip_scope global --training.folder {folder} --training.steps {steps}"
    config = parse([*SMALL, *layout.split(), *rules.split(), *more.split()])
    with patch.object(pipelines, "manners_of", lambda _: NCCL), recording() as found:
        train(config, Launch(rank, 4, rank), is_quiet=True)
    return found


def test_whole_runs_with_windows_that_grow_and_what_goes_on_from_their_checkpoint(tmp_path: Path):
    for steps in (4, 8):
        by_rank = run_local_ranks(record_training, 4, str(tmp_path), steps)
        assert find_hangs([[own] for own in by_rank], [steps]) == {}
    grown = [line for line in read_metrics(tmp_path, 0) if line["event"] == "horizon"]
    assert len(grown) == 4
    assert any(line["size"] != line["before"] for line in grown)
