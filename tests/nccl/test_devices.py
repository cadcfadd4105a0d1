"""What a rank does on a GPU before, beside and after its messages; no GPU is needed to see it."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import build_pipeline, mesh
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, join, leave
from mpc_dist.runtime.transport import GLOO, NCCL, manners_of
from mpc_dist.windows import backprop
from tests.runtime.reference import KeepGradients


def test_a_rank_uses_its_own_gpu_before_it_meets_the_others(monkeypatch):
    """`horizon: auto` joins and broadcasts a plan: by the current device, which is the first one unless it is set."""
    done: list[str] = []
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"use {device}"))
    monkeypatch.setattr(mesh, "rendezvous", lambda *_, **__: done.append("meet") or iter(()))
    with pytest.raises(StopIteration):
        join(Launch(5, 8, 1), "cuda", 1.0)
    assert done == ["use cuda:1", "meet"]


def test_one_hardware_queue_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* would hang; unset it"):
        join(Launch(), "cuda", 1.0)
    join(Launch(), "cpu", 1.0)


def test_the_backend_decides_how_messages_are_asked_for():
    assert manners_of(torch.device("cuda", 3)) is NCCL
    assert manners_of(torch.device("cpu")) is GLOO


def test_what_a_rank_tells_of_itself_reads_nothing_off_a_gpu(monkeypatch):
    pipeline = build_pipeline([nn.Linear(3, 3)], mean_squared_error, horizon=backprop(1), optimizer=KeepGradients)
    pipeline.step(*torch.randn(2, 4, 3))
    monkeypatch.setattr(pipeline.guard, "find", lambda: pytest.fail("it waits for the device"))
    pipeline.mesh = dataclasses.replace(pipeline.mesh, device=torch.device("cuda", 0))
    assert pipeline.describe()["step"] == 2


def leave_after(_rank: int, has_failed: bool) -> list[str]:
    """How the group is left, on NCCL."""
    done: list[str] = []
    destroy = dist.destroy_process_group
    dist.get_backend = lambda: "nccl"
    dist.destroy_process_group = lambda: done.append("in order") or destroy()
    mesh._abort_process_group = lambda: done.append("at once") or destroy()
    leave(has_failed=has_failed)
    return done


@pytest.mark.parametrize(("has_failed", "how"), [(False, "in order"), (True, "at once")])
def test_after_a_failure_nobody_waits_for_kernels_that_never_end(has_failed, how):
    assert run_local_ranks(leave_after, 2, has_failed) == [[how], [how]]
