"""Windows that change during training: over ranks and replicas, with local heads and with one shared head."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mpc_dist.models import Chain
from mpc_dist.runtime import pipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.schedule import Schedule, ScheduleError, build_schedule
from tests.examples import build_dense_chain
from tests.runtime.reference import reference_gradients
from tests.runtime.test_distributed import adamw, batches, build_chain_with_one_head, connect, windows_for

M = 3
CHANGES = [("tumbling 1", 3), ("tumbling 3", 2), ("backprop", 2), ("sliding 2", 2)]


def build(is_shared: bool) -> Chain:
    return build_chain_with_one_head() if is_shared else build_dense_chain([3, 4, 5, 4, 3, 4, 3])[0]


def change_windows(rank: int, partition: tuple[int, ...], num_replicas: int, is_shared: bool) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    chain = build(is_shared)
    pipeline = None
    given = iter(batches(num_replicas) * 2)
    for name, num_steps in CHANGES:
        windows = windows_for(name, partition)
        if pipeline is None:
            settings = {"optimizer": adamw, "num_microbatches": M, "split": True, "replicas": num_replicas}
            pipeline = connect(rank, partition, windows, chain, **settings)
        else:
            pipeline.change_windows(windows)
        for _ in range(num_steps):
            pipeline.step(*next(given)[pipeline.mesh.replica])
    pipeline.close()
    return {key: value.detach().clone() for key, value in pipeline.named_parameters().items()}


@pytest.mark.parametrize("is_shared", [False, True], ids=["local heads", "a shared head"])
@pytest.mark.parametrize(("partition", "num_replicas"), [((2, 4), 1), ((2, 1, 3), 1), ((3, 3), 2)], ids=str)
@pytest.mark.usefixtures("float64")
def test_weights_after_changes_of_windows_equal_the_sequential_reference(partition, num_replicas, is_shared):
    chain = build(is_shared)
    given = iter(batches(num_replicas) * 2)
    named = dict(chain.named_parameters())
    update = adamw(list(named.values()))
    for name, num_steps in CHANGES:
        for _ in range(num_steps):
            update.zero_grad(set_to_none=True)  # a readout that is not read does not move
            for batch in next(given):
                gradients = reference_gradients(chain, *batch, windows_for(name, partition), M)
                for key, gradient in gradients.items():
                    before = named[key].grad
                    share = gradient / num_replicas
                    named[key].grad = share if before is None else before + share
            update.step()
    by_rank = run_local_ranks(change_windows, len(partition) * num_replicas, partition, num_replicas, is_shared)
    assert {key for key in named if key.startswith("blocks.")} <= {key for found in by_rank for key in found}
    for found in by_rank:
        for key, value in found.items():
            torch.testing.assert_close(value, named[key].detach(), rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.usefixtures("float64")
def test_a_change_of_windows_is_refused_if_its_schedule_would_not_run(monkeypatch):
    """The builder's schedules do; whatever else makes one is checked as that of the first windows is."""
    chain = build(False)
    whole = connect(0, (6,), windows_for("tumbling 3", (6,)), chain, optimizer=adamw, num_microbatches=M)

    def forget_the_last_backward(*arguments, **options) -> Schedule:
        schedule = build_schedule(*arguments, **options)
        return dataclasses.replace(schedule, programs=tuple(program[:-1] for program in schedule.programs))

    monkeypatch.setattr(pipeline, "build_schedule", forget_the_last_backward)
    with pytest.raises(ScheduleError):
        whole.change_windows(windows_for("tumbling 1", (6,)))


def change_often(rank: int, partition: tuple[int, ...]) -> list[tuple[int, int]]:
    """Threads and descriptors of this process, each time that the windows are as at first."""
    torch.set_default_dtype(torch.float64)
    settings = {"optimizer": adamw, "num_microbatches": M}
    windows = [windows_for(name, partition) for name in ("tumbling 1", "backprop", "tumbling 1")]
    pipeline = connect(rank, partition, windows[0], build(is_shared=True), **settings)
    given, found = batches(1)[0][0], []
    pipeline.step(*given)
    for _ in range(4):
        for changed in windows:
            pipeline.change_windows(changed)
            pipeline.step(*given)
        found.append((len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))))
    pipeline.close()
    return found


def test_changes_of_windows_keep_no_group_of_a_shared_head():
    for counts in run_local_ranks(change_often, 2, (2, 4)):
        assert counts == [counts[0]] * 4
