"""Trains on gloo ranks of this machine with blocks that misbehave at a given step and micro-batch."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpc_dist.models import build_parts
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.training import job
from mpc_dist.training.config import Config
from tests.training.local import train_rank

SMALL = (
    "--model.name res_mlp --model.num_blocks 6 --data.name trigonometric --data.num_train 400 --readout.kind pool "
    "--batch_size 12 --parallel.microbatches 3 --training.log_every 1 --training.eval_batches 1 --device cpu"
).split()


@dataclass(frozen=True)
class Fault:
    """What a block does wrong, in one micro-batch of one step (from 0) or, with `step` None, always."""

    block: int
    how: Literal["activation", "adjoint", "gradient", "sleep", "stop", "die", "drift"]
    step: int | None = None
    microbatch: int = 0
    seconds: float = 0.0
    """How long `sleep` takes; after how long what was stopped is killed."""
    replica: int = 0


def inject(fault: Fault, num_microbatches: int, block: nn.Module) -> nn.Module:
    calls = -1  # start-up runs each block once

    def spoil(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        if not torch.is_grad_enabled():
            return output  # an evaluation
        place = divmod(calls, num_microbatches)
        calls += 1
        if fault.step is not None and place != (fault.step, fault.microbatch):
            return output
        if fault.how == "sleep":
            time.sleep(fault.seconds)
        elif fault.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.how == "stop":
            subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.how == "drift":
            with torch.no_grad():  # by the least that a float can differ
                bias = next(p for p in block.parameters() if p.ndim == 1)
                bias.copy_(torch.nextafter(bias, torch.tensor(9.0)))
        elif fault.how == "activation":
            return output * math.nan
        elif fault.how == "adjoint":
            output.register_hook(lambda gradient: gradient * math.inf)
        else:  # in the graph behind the weights' sum, where the adjoint at the input does not pass
            return output + Spoil.apply(next(block.parameters()).sum() * 0)
        return output

    block.register_forward_hook(spoil)
    return block


class Spoil(torch.autograd.Function):
    """Nothing forward, and a NaN on the way back."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.nan


class FaultyParts:
    def __init__(self, parts: Any, fault: Fault, num_microbatches: int) -> None:
        self._parts = parts
        self._fault = fault
        self._num_microbatches = num_microbatches

    def block(self, index: int) -> nn.Module:
        block = self._parts.block(index)
        return inject(self._fault, self._num_microbatches, block) if index == self._fault.block else block

    def readout(self, boundary: int) -> nn.Module:
        return self._parts.readout(boundary)


def train_faulty_rank(rank: int, config: Config, fault: Fault | None) -> None:
    if fault is not None and rank % config.data_parallel.degree == fault.replica:
        make: Callable[..., Any] = build_parts
        job.build_parts = lambda *a, **k: FaultyParts(make(*a, **k), fault, config.parallel.microbatches)  # type: ignore[assignment]
    train_rank(rank, config)


def train_faulty(config: Config, fault: Fault | None, *, may_fail: bool = False, timeout: float = 120.0) -> list[Any]:
    """What each rank returned; with `may_fail`, the text of what it raised."""
    return run_local_ranks(train_faulty_rank, config.num_ranks, config, fault, may_fail=may_fail, timeout=timeout)
