"""`bench.py compute`: real compute on 2 ranks, beside torch's 1F1B, DeepSpeed's pipeline and one process.

The model is a chain of residual MLP blocks. Every system does the same work per step: forward, backward, an SGD update.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.bench.deepspeed_peer import DEEPSPEED, build_deepspeed, has_deepspeed
from mpc_dist.bench.peers import Step, build_peer
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import lay_out, split_evenly
from mpc_dist.windows import expand, sliding

TIMEOUT = timedelta(seconds=120)
LEARNING_RATE = 1e-3
PEER = "torch-1F1B backprop"


@dataclass(frozen=True)
class ComputeSetting:
    """What every rank measures."""

    num_ranks: int = 2
    num_blocks: int = 16
    width: int = 512
    batch_size: int = 512
    microbatches: tuple[int, ...] = (2, 4, 8, 16)
    repeats: int = 5
    steps: int = 2
    """Steps per system and repeat."""
    device_type: str = "cpu"
    """With cuda, a GPU per rank."""
    with_deepspeed: bool = True
    """Whether DeepSpeed's pipeline is measured, too, if it is installed."""


class MLPBlock(nn.Module):
    """x + W2 relu(W1 x), four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, state: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        out: Tensor = state + self.contract(F.relu(self.expand(state)))
        return out


def bench_compute(setting: ComputeSetting) -> list[Row]:
    """Rows of every system, with the ratio of torch's 1F1B to each."""
    rows = []
    for num_microbatches in setting.microbatches:
        budget = 300.0 + 60 * setting.repeats
        by_rank = run_local_ranks(
            _measure, setting.num_ranks, setting, num_microbatches, timeout=budget, device_type=setting.device_type
        )
        peer = _slowest(by_rank, PEER)
        for name in by_rank[0]:
            times = _slowest(by_rank, name)
            system, _, windows = name.partition(" ")
            # Each repeat against the peer of the same repeat.
            ratio = statistics.median(p / t for p, t in zip(peer, times, strict=True))
            extra: dict[str, Any] = {"1F1B / this": ratio}
            overheads = [rank[name]["overhead"] for rank in by_rank if "overhead" in rank[name]]
            if overheads:
                extra["overhead us/action"] = 1e6 * max(overheads)
            rows.append(
                Row.of_times(
                    times,
                    system=system,
                    windows=windows,
                    split=False,
                    stages=setting.num_ranks if system != "one-process" else 1,
                    microbatches=num_microbatches,
                    extra=extra,
                )
            )
    return rows


def _slowest(by_rank: list[dict[str, Any]], name: str) -> list[float]:
    return [max(times) for times in zip(*(rank[name]["times"] for rank in by_rank), strict=True)]


def _measure(rank: int, setting: ComputeSetting, num_microbatches: int) -> dict[str, dict[str, Any]]:
    launch = Launch(rank, setting.num_ranks, rank)
    mesh = build_mesh(launch, num_stages=setting.num_ranks, device_type=setting.device_type, timeout=TIMEOUT)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(2, setting.batch_size, setting.width, generator=generator).to(mesh.device)
    ours = {
        "mpc_dist sliding:1": _Ours(mesh, setting, num_microbatches, 1, inputs, labels),
        "mpc_dist backprop": _Ours(mesh, setting, num_microbatches, setting.num_ranks, inputs, labels),
    }
    systems: dict[str, Callable[[], None]] = {
        **ours,
        PEER: _torch_step(rank, setting, num_microbatches, inputs, labels),
        "one-process backprop": _plain_step(rank, setting, num_microbatches, inputs, labels),
    }
    if setting.with_deepspeed and has_deepspeed():
        systems[f"{DEEPSPEED} backprop"] = build_deepspeed(
            setting.num_ranks,
            num_microbatches,
            [MLPBlock(setting.width) for _ in range(setting.num_blocks)],
            inputs,
            labels,
            mean_squared_error,
            learning_rate=LEARNING_RATE,
        )
    results: dict[str, dict[str, Any]] = {name: {"times": []} for name in systems}
    for system in systems.values():
        system()
    for _ in range(setting.repeats):
        for name, system in systems.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(setting.steps):
                system()
            dist.barrier()  # a step counts as done when it is done everywhere
            results[name]["times"].append((time.perf_counter() - start) / setting.steps)
    for name, system in ours.items():
        results[name]["overhead"] = system.overhead_per_action()
        system.pipeline.close()
    return results


class _Ours:
    def __init__(
        self, mesh: Mesh, setting: ComputeSetting, num_microbatches: int, horizon: int, inputs: Tensor, labels: Tensor
    ) -> None:
        partition = split_evenly(setting.num_blocks, setting.num_ranks)
        self.pipeline = Pipeline(
            mesh,
            lay_out(expand(sliding(setting.num_ranks, horizon), partition), partition),
            build_block=lambda _: MLPBlock(setting.width),
            build_readout=lambda _: Identity(),
            loss=mean_squared_error,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
            num_microbatches=num_microbatches,
            options=StageOptions(record_times=True),
            timeout=TIMEOUT,
        )
        self._batch = inputs, labels
        self._overheads: list[float] = []

    def __call__(self) -> None:
        waited_before = self.pipeline.seconds_waiting
        start = time.perf_counter()
        record = self.pipeline.step(*self._batch).record
        total = time.perf_counter() - start
        busy = sum(interval.end - interval.start for interval in record.timeline)
        waited = self.pipeline.seconds_waiting - waited_before
        num_actions = len(self.pipeline.schedule.programs[self.pipeline.mesh.stage])
        self._overheads.append((total - busy - waited) / num_actions)

    def overhead_per_action(self) -> float:
        """Seconds per action that were neither compute nor waiting: the median over all steps."""
        return statistics.median(self._overheads)


def _torch_step(rank: int, setting: ComputeSetting, num_microbatches: int, inputs: Tensor, labels: Tensor) -> Step:
    partition = split_evenly(setting.num_blocks, setting.num_ranks)

    def build_chunk(index: int, _: int) -> nn.Module:
        return nn.Sequential(*(MLPBlock(setting.width) for _ in range(partition[index]))).to(inputs.device)

    return build_peer(
        "torch-1F1B",
        rank,
        setting.num_ranks,
        num_microbatches,
        build_chunk,
        inputs,
        labels,
        mean_squared_error,
        learning_rate=LEARNING_RATE,
    )


def _plain_step(rank: int, setting: ComputeSetting, num_microbatches: int, inputs: Tensor, labels: Tensor) -> Step:
    """The whole model on rank 0 with one thread; the other ranks have nothing to do."""
    if rank:
        return lambda: None
    model = nn.Sequential(*(MLPBlock(setting.width) for _ in range(setting.num_blocks))).to(inputs.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        for x, y in zip(inputs.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True):
            torch.autograd.backward(mean_squared_error(model(x), y) / num_microbatches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
