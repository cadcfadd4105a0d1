"""Lets the accelerate file decide what our configuration leaves open, and refuses where both decide differently."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mpc_dist.training.config import Config

_UNSUPPORTED = {
    "ACCELERATE_USE_FSDP": "distributed_type FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "distributed_type MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Accelerate's names and ours; it has none for float64."""
_OFFLOADS = ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")


@dataclass(frozen=True)
class AccelerateSettings:
    """The part of accelerate's file that decides how we train; None where it says nothing."""

    mixed_precision: str = "no"
    """A key of PRECISIONS."""
    use_cpu: bool = False
    """Whether to compute on the CPU."""
    use_deepspeed: bool = False
    """Whether the distributed type is DEEPSPEED."""
    zero_stage: int | None = None
    """deepspeed_config.zero_stage."""
    deepspeed_config_file: str | None = None
    """deepspeed_config.deepspeed_config_file."""
    gradient_clipping: float | None = None
    """deepspeed_config.gradient_clipping."""

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> "AccelerateSettings":
        """From the ACCELERATE_* variables that `accelerate launch` sets."""
        for name, setting in _UNSUPPORTED.items():
            if _is_true(environment.get(name)):
                raise ValueError(
                    f"the accelerate file's {setting} ({name}) is not supported; use distributed_type MULTI_GPU or "
                    "DEEPSPEED, and parallel.stages and data_parallel.degree of our configuration"
                )
        precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        if precision not in PRECISIONS:
            raise ValueError(
                f"the accelerate file's mixed_precision {precision!r} (ACCELERATE_MIXED_PRECISION) is not supported; "
                "use bf16, fp16 or 'no'"
            )
        if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
            raise ValueError(
                "the accelerate file's dynamo_config (ACCELERATE_DYNAMO_BACKEND) is not supported; drop it"
            )
        use_cpu = _is_true(environment.get("ACCELERATE_USE_CPU"))
        if not _is_true(environment.get("ACCELERATE_USE_DEEPSPEED")):
            return cls(precision, use_cpu)
        for name in _OFFLOADS:
            if environment.get(name, "none") != "none":
                raise ValueError(f"the accelerate file's deepspeed_config offloads ({name}); that is not supported")
        accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
        if accumulation not in ("1", "auto"):
            raise ValueError(
                f"the accelerate file's gradient_accumulation_steps {accumulation} "
                "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS) contradicts parallel.microbatches, which cuts a batch here; "
                "leave it out of the accelerate file"
            )
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
        return cls(
            precision,
            use_cpu,
            use_deepspeed=True,
            zero_stage=None if stage is None else int(stage),
            deepspeed_config_file=environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
            gradient_clipping=None if clipping in ("auto", "none") else float(clipping),
        )


def _is_true(value: str | None) -> bool:
    return value is not None and value.lower() in ("1", "true", "yes")


def obey_accelerate(config: Config, variables: Mapping[str, str], given: Mapping[str, str]) -> Config:
    """The configuration with what `accelerate launch` says in its variables; unchanged if there are none.

    `given` has the fields that a file or the command line gave, and where: those must not say something else.
    """
    if not variables:
        return config
    settings = AccelerateSettings.parse(variables)
    wanted: list[tuple[str, str, Any]] = []
    if settings.mixed_precision != "no" or config.training.precision in PRECISIONS.values():
        wanted.append(("mixed_precision", "training.precision", PRECISIONS[settings.mixed_precision]))
    if settings.use_cpu:
        wanted.append(("use_cpu", "device", "cpu"))
    if settings.use_deepspeed:
        wanted.append(("distributed_type DEEPSPEED", "data_parallel.sharding", "deepspeed"))
    if settings.zero_stage is not None:
        wanted.append(("deepspeed_config.zero_stage", "data_parallel.stage", settings.zero_stage))
    if settings.deepspeed_config_file is not None:
        file = settings.deepspeed_config_file
        wanted.append(("deepspeed_config.deepspeed_config_file", "data_parallel.deepspeed_config", file))
    if settings.gradient_clipping is not None:
        wanted.append(("deepspeed_config.gradient_clipping", "training.clip_norm", settings.gradient_clipping or None))
    changes: dict[str, dict[str, Any]] = {}
    for theirs, field, value in wanted:
        section, _, name = field.rpartition(".")
        ours = getattr(getattr(config, section) if section else config, name)
        if ours == value:
            continue
        if field in given:
            raise ValueError(
                f"the accelerate file's {theirs} asks for {field} {_plain(value)}, but {given[field]} sets it to "
                f"{_plain(ours)}; make them agree"
            )
        changes.setdefault(section, {})[name] = value
    if not changes:
        return config
    top = changes.pop("", {})
    return replace(config, **top, **{name: replace(getattr(config, name), **inner) for name, inner in changes.items()})


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, str) else json.dumps(value)
