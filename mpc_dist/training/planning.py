"""From a configuration to a plan: measure the model, run Algorithm 1, price what can be done, choose.

A profile is kept in a file and used again while nothing that it depends on has changed.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mpc_dist.data import Batch, Batches
from mpc_dist.data.reading import Part
from mpc_dist.models import BlockModel, Chain, build_chain
from mpc_dist.planner.choose import Planned, Report, choose_plan
from mpc_dist.planner.measurements import Measurements, load_measurements, save_measurements, slowest
from mpc_dist.planner.plan import Plan
from mpc_dist.planner.request import Request
from mpc_dist.precision import Precision, set_tf32
from mpc_dist.profile import AngleProfile, measure_angles, measure_memory
from mpc_dist.profile.blocks import measure_blocks, without_allocating
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.task import Task
from mpc_dist.training.config import Config
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.size import check_size
from mpc_dist.validation import check_real, check_whole
from mpc_dist.windows import Windows, shrink, sliding

DEFAULT_PROBE_BLOCKS = 12
PROFILE_TIMEOUT = 900.0
PROBE_WIDTH = 64


@dataclass(frozen=True)
class Probe:
    """How the model is measured."""

    exact: bool = False
    """Whether every horizon is measured instead of at most six."""
    num_batches: int = 4
    """Batches for the angle."""
    repeats: int = 5
    """Runs of which each time is the median."""
    processes: int = 1
    """Processes that measure times at once: ranks of one host share its memory and caches."""
    profiles: Path = Path("runs/profiles")
    """Where measured profiles are kept."""
    fake_tflops: float | None = None
    """Plan without allocating the model: times follow from operations, 10^12 of them so many times a second."""
    angles_file: Path | None = None
    """An angle profile to use instead of measuring one."""

    def __post_init__(self) -> None:
        check_whole("number of batches:", self.num_batches, minimum=1)
        check_whole("repeats:", self.repeats, minimum=1)
        check_whole("number of measuring processes:", self.processes, minimum=1)
        if self.fake_tflops is not None:
            check_real("tflops", self.fake_tflops, minimum=1e-6)


def plan_for(
    config: Config, request: Request, probe: Probe, *, report: Report = lambda _what, _done, _total: None
) -> Planned:
    """Measure, select and search."""
    set_tf32(config.torch_device, is_allowed=config.training.tf32)
    data = config.data.load()
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    samples = [place(batch, config) for batch in islice(batches, probe.num_batches)]
    if probe.fake_tflops is None:
        chain = build_whole_chain(config, data.task)
        angle_note, cosine = _measured_angles(chain, samples, config, probe, report)
    else:
        chain = None
        angle_note, cosine = _probed_angles(config, data.task, samples, probe, report)
    measurements = _measurements(config, data.task, samples[0], probe, report)
    return choose_plan(
        measurements,
        cosine,
        lambda horizon: _memory(chain, samples[0], horizon, measurements[1], config.training.build_precision()),
        request,
        exact=probe.exact,
        fingerprint=fingerprint(config),
        notes=(f"angles: {angle_note}", f"times and bytes: {measurements[1].source}"),
        report=report,
    )


def fingerprint(config: Config) -> dict[str, Any]:
    """The parts of a configuration that a plan depends on, as they stand in YAML."""
    values = config.as_dict()
    kept = {name: values[name] for name in ("model", "lora", "data", "batch_size")}
    kept["readout"] = config.readout.identify()
    kept |= {name: values["training"][name] for name in ("precision", "bfloat16_weights")}
    kept["optimizer"] = {"name": config.optimizer.name, "momentum": config.optimizer.used_momentum}
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def apply_plan(config: Config, plan: Plan) -> Config:
    """The configuration that trains as planned."""
    plan.check_fits(fingerprint(config))
    chosen = plan.chosen
    return dataclasses.replace(
        config,
        horizon=dataclasses.replace(
            config.horizon,
            mode="fixed",
            windows=chosen.shape.windows,
            size=chosen.shape.size,
            unit=chosen.shape.unit,
        ),
        parallel=dataclasses.replace(
            config.parallel,
            stages=chosen.num_gpus,
            partition=chosen.partition,
            microbatches=chosen.microbatches,
            split=chosen.split,
            cap=chosen.cap,
        ),
        training=dataclasses.replace(config.training, recompute=chosen.checkpoint),
    )


def build_whole_chain(config: Config, task: Task) -> Chain:
    """The configured model with a readout at every boundary, on its device, in the type of its weights."""
    check_size(config, task, range(config.model.num_blocks))
    chain = build_chain(config.trained_model, task, readout=config.readout, seed=config.seed)
    return chain.to(device=config.torch_device, dtype=config.torch_dtype)


def place(batch: Batch, config: Config) -> Batch:
    """The batch on the configured device, real values in the configured precision."""
    part = Part(*batch, len(batch[0])).to(config.torch_dtype)
    assert part.inputs is not None
    assert part.labels is not None
    return part.inputs.to(config.torch_device), part.labels.to(config.torch_device)


def _measured_angles(
    chain: Chain, samples: list[Batch], config: Config, probe: Probe, report: Report
) -> tuple[str, Callable[[Windows], float]]:
    path = probe.angles_file or probe.profiles / f"angles-{_digest(_angle_key(config, probe))}.json"
    if path.exists():
        profile = AngleProfile.read(path)
        return f"read from {path}", _cosine_of(profile, config.model.num_blocks)
    if probe.angles_file is not None:
        raise ValueError(f"there is no angle profile {probe.angles_file}")
    done = iter(range(1, len(samples) * chain.num_blocks + 1))
    total = len(samples) * chain.num_blocks
    profile = measure_angles(
        chain, samples, precision=config.training.build_precision(), advance=lambda: report("angles", next(done), total)
    )
    profile.write(path)
    return f"measured on {len(samples)} batches, kept in {path}", profile.cosine


def _probed_angles(
    config: Config, task: Task, samples: list[Batch], probe: Probe, report: Report
) -> tuple[str, Callable[[Windows], float]]:
    """For a model that is not built: a given profile, or that of a smaller model of the same family."""
    if probe.angles_file is not None:
        profile = AngleProfile.read(probe.angles_file)
        note = f"read from {probe.angles_file} ({profile.num_blocks} blocks)"
        return note, _cosine_of(profile, config.model.num_blocks)
    small = _scale_down(config.model)
    chain = build_chain(small, task, readout=config.readout, seed=config.seed).to(dtype=config.torch_dtype)
    few = [tuple(part[:4] for part in batch) for batch in samples[:2]]
    total = len(few) * chain.num_blocks
    done = iter(range(1, total + 1))
    profile = measure_angles(
        chain,
        few,  # type: ignore[arg-type]
        precision=config.training.build_precision(),
        advance=lambda: report("angles of the scaled-down probe", next(done), total),
    )
    note = f"a scaled-down probe with {small.num_blocks} blocks ({small})"
    return note, _cosine_of(profile, config.model.num_blocks)


def _scale_down(model: BlockModel) -> BlockModel:
    """The same family, with at most 12 blocks and narrow."""
    fields = {field.name for field in dataclasses.fields(model)}  # type: ignore[arg-type]
    if not {"num_blocks", "width"} <= fields:
        raise ValueError(f"a {type(model).__name__} has no probe of a smaller size; give its angles by --angles FILE")
    num_blocks = max(n for n in range(1, DEFAULT_PROBE_BLOCKS + 1) if model.num_blocks % n == 0)
    smaller = {"num_blocks": num_blocks, "width": min(PROBE_WIDTH, model.width)}  # type: ignore[attr-defined]
    if "num_heads" in fields:
        smaller["num_heads"] = 4
    found: BlockModel = dataclasses.replace(model, **smaller)  # type: ignore[type-var]
    return found


def _cosine_of(profile: AngleProfile, num_blocks: int) -> Callable[[Windows], float]:
    if profile.num_blocks == num_blocks:
        return profile.cosine
    if num_blocks % profile.num_blocks:
        raise ValueError(
            f"the angle profile has {profile.num_blocks} blocks, which do not divide the model's {num_blocks}; "
            "measure one that does"
        )
    return lambda windows: profile.cosine(shrink(windows, profile.num_blocks))


def microbatch_counts(config: Config) -> tuple[int, ...]:
    """Numbers of micro-batches that cut the batch evenly: powers of two up to 16."""
    return tuple(m for m in (1, 2, 4, 8, 16) if config.batch_size % m == 0)


def _measurements(config: Config, task: Task, sample: Batch, probe: Probe, report: Report) -> dict[int, Measurements]:
    key = _angle_key(config, probe) | {
        "device": config.torch_device.type,
        "optimizer": config.as_dict()["optimizer"],
        "tf32": config.training.tf32,
        "fake_tflops": probe.fake_tflops,
        "threads": torch.get_num_threads(),
        "processes": probe.processes,
        "torch": torch.__version__,
    }
    path = probe.profiles / f"blocks-{_digest(key)}.json"
    known = load_measurements(path, key)
    if known is not None:
        return known
    if probe.processes > 1 and probe.fake_tflops is None:
        by_rank = run_local_ranks(_measure_on_rank, probe.processes, config, probe, timeout=PROFILE_TIMEOUT)
        found = {m: slowest(tuple(one[m] for one in by_rank)) for m in by_rank[0]}
    else:
        found = _measure_counts(config, task, sample, probe, report)
    save_measurements(path, found, key)
    return found


def _measure_on_rank(_rank: int, config: Config, probe: Probe) -> dict[int, Measurements]:
    data = config.data.load()
    batches = Batches(data.train, batch_size=config.batch_size, seed=config.seed)
    sample = place(next(batches), config)
    dist.barrier()  # all at once, as the ranks will run
    return _measure_counts(config, data.task, sample, probe, lambda _what, _done, _total: None)


def _measure_counts(config: Config, task: Task, sample: Batch, probe: Probe, report: Report) -> dict[int, Measurements]:
    counts = microbatch_counts(config)
    timed = counts if probe.fake_tflops is None else counts[:1]
    total = len(timed) * config.model.num_blocks * (probe.repeats + 1 if probe.fake_tflops is None else 1)
    done = iter(range(1, total + 1))
    found = {}
    with _chain_to_measure(config, task, probe) as chain:
        for m in timed:
            inputs, labels = (_as_the_chain(part, chain)[: config.batch_size // m] for part in sample)
            found[m] = measure_blocks(
                chain,
                inputs,
                labels,
                partial(build_optimizer, config.optimizer, blocks=chain.blocks),
                precision=config.training.build_precision(),
                repeats=probe.repeats,
                flops_per_second=None if probe.fake_tflops is None else 1e12 * probe.fake_tflops,
                advance=lambda: report("times and bytes of blocks", next(done), total),
            )
    for m in counts[len(timed) :]:
        found[m] = found[1].cut_into(m)
    return found


@contextmanager
def _chain_to_measure(config: Config, task: Task, probe: Probe) -> Iterator[Chain]:
    if probe.fake_tflops is None:
        yield build_whole_chain(config, task)
        return
    # A fake module cannot be converted afterwards.
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.torch_dtype)
    try:
        with without_allocating():
            yield build_chain(config.trained_model, task, readout=config.readout, seed=config.seed)
    finally:
        torch.set_default_dtype(default)


def _as_the_chain(part: Tensor, chain: Chain) -> Tensor:
    """The tensor, or only its shape if the chain has no more."""
    weight = next(chain.parameters())
    return weight.fake_mode.from_tensor(part) if isinstance(weight, FakeTensor) else part


def _memory(
    chain: Chain | None, sample: Batch, horizon: int, measurements: Measurements, precision: Precision
) -> float:
    """M(h): weights, gradients, optimizer state, and what the eager sweep holds of a whole batch.

    Without a chain to sweep it follows from the bytes of the blocks.
    """
    every = range(measurements.num_blocks)
    weights = measurements.weight_bytes(every, sliding(len(every), horizon).readouts)
    if chain is None:
        return weights + measurements.sweep_bytes(horizon)
    return weights + measure_memory(chain, *sample, horizons=[horizon], precision=precision)[horizon]


def _angle_key(config: Config, probe: Probe) -> dict[str, Any]:
    key = fingerprint(config) | {"seed": config.seed, "num_batches": probe.num_batches}
    key.pop("optimizer")
    return key


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
