"""`bench.py plan`: what the planner predicts, beside what the planned runs then do, on local ranks."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpc_dist.bench.rows import Row
from mpc_dist.data import DigitsData, TextData, TrigonometricData
from mpc_dist.models import GPT, ResMLP, ResNetCifar
from mpc_dist.planner.choose import Planned
from mpc_dist.planner.plan import Candidate, Plan
from mpc_dist.planner.request import Request
from mpc_dist.readout import ReadoutConfig
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.training.config import Config
from mpc_dist.training.job import train
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.planning import Probe, apply_plan, plan_for
from mpc_dist.training.sections import CheckpointsConfig, OptimizerConfig, TrainingConfig

STEPS = 44
WARM_UP, TIMED = 6, 18
PLENTY = 2.0**40
TIMEOUT = 600.0

MODELS: dict[str, Config] = {
    "res_mlp wide": Config(
        model=ResMLP(num_blocks=12, width=512), data=TrigonometricData(num_train=4096), batch_size=512
    ),
    "gpt": Config(model=GPT(num_blocks=8, width=128, num_heads=4), data=TextData(context=128, max_bytes=500_000)),
    "resnet62 small": Config(model=ResNetCifar(blocks_per_group=10, channels=8), data=DigitsData(), batch_size=128),
}


@dataclass(frozen=True)
class Measured:
    """What a planned run did."""

    step_seconds: list[float]
    """Of the slowest rank, after some to warm up."""
    bytes_per_rank: list[float]


def bench_plan(
    stages: tuple[int, ...], names: tuple[str, ...], *, on_progress: Callable[[], None] = lambda: None
) -> list[Row]:
    """Rows of predicted and measured step times and bytes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for num_stages in stages:
                config = _config(name, Path(folder) / f"{name}-{num_stages}")
                planned = _plan(config, num_stages, Path(folder))
                for candidate in _chosen(planned):
                    measured = _run(config, planned, candidate)
                    rows.append(_row(name, candidate, measured))
                    on_progress()
    return rows


def _config(name: str, folder: Path) -> Config:
    return replace(
        MODELS[name],
        readout=ReadoutConfig("local"),
        optimizer=OptimizerConfig("adamw"),
        training=TrainingConfig(steps=STEPS, log_every=1, eval_every=STEPS, eval_batches=1, folder=str(folder)),
        checkpoints=CheckpointsConfig(every=0),
        device="cpu",
    )


def _plan(config: Config, num_stages: int, folder: Path) -> Planned:
    # Latency and bandwidth of gloo on the loopback.
    request = Request(gpu_memory=PLENTY, num_gpus=num_stages, latency=3e-4, bandwidth=1.5e9)
    return plan_for(config, request, Probe(num_batches=1, processes=num_stages, profiles=folder / "profiles"))


def _chosen(planned: Planned) -> list[Candidate]:
    """Back-propagation and a horizon of one stage, each at its best."""
    found: dict[str, Candidate] = {}
    for one in planned.plan.candidates:
        if one.name in ("backprop", "sliding 1 stages, split"):
            found.setdefault(one.name, one)
    return list(found.values())


def _run(config: Config, planned: Planned, candidate: Candidate) -> Measured:
    plan: Plan = replace(planned.plan, chosen=candidate, costs=planned.planner.costs_of(candidate))
    run_local_ranks(_train, candidate.num_gpus, apply_plan(config, plan), plan, timeout=TIMEOUT)
    folder = Path(config.training.folder)
    by_rank = [
        [line for line in read_metrics(folder, rank) if line["event"] == "step"] for rank in range(candidate.num_gpus)
    ]
    # Later steps also write their timelines. All ranks keep the same pace: the slowest one's median counts.
    timed = [[line["step_seconds"] for line in lines[WARM_UP : WARM_UP + TIMED]] for lines in by_rank]
    return Measured(max(timed, key=statistics.median), [float(lines[0]["rank_bytes"]) for lines in by_rank])


def _train(rank: int, config: Config, plan: Plan) -> None:
    train(config, Launch(rank, config.parallel.stages, rank), costs=plan.build_costs(), is_quiet=True)


def _row(name: str, candidate: Candidate, measured: Measured) -> Row:
    ratios = [found / told for found, told in zip(measured.bytes_per_rank, candidate.bytes_per_rank, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    median = statistics.median(measured.step_seconds)
    extra: dict[str, Any] = {
        "model": name,
        "predicted ms": 1000 * candidate.step_seconds,
        "time measured/predicted": median / candidate.step_seconds,
        "bytes measured/predicted, worst rank": worst,
    }
    return Row.of_times(
        measured.step_seconds,
        system="mpc_dist",
        windows=str(candidate.shape),
        split=candidate.split,
        stages=candidate.num_gpus,
        microbatches=candidate.microbatches,
        extra=extra,
    )
