"""A stage's optimizer, shared among its replicas by DeepSpeed's ZeRO: each keeps the state of its part of the weights.

The pipeline's own backward passes add to `.grad`, over micro-batches, halves and readouts. DeepSpeed gets a gradient
when its segment has it complete; DeepSpeed's own hooks would take it at its first change, so they are taken off.
"""

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpc_dist.runtime.reducer import Travel
from mpc_dist.runtime.state import Fragment

BUCKET_ELEMENTS = 5_000_000
"""How many gradient elements travel in one message at most, unless the settings say otherwise; DeepSpeed's own 500
million would take 2 GB on every rank."""

STEPS_PER_PRINT = 2**31  # never

_NOT_OURS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size and parallel.microbatches",
    "gradient_accumulation_steps": "parallel.microbatches",
    "optimizer": "optimizer",
    "scheduler": "optimizer.scheduler",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "torch_autocast": "training.precision",
}
_REFUSED = {"overlap_comm": (None, False, "auto"), "offload_optimizer": (None,), "offload_param": (None,)}


@dataclass(frozen=True)
class ZeroSettings:
    """What DeepSpeed is told, besides what the pipeline decides itself."""

    stage: Literal[1, 2] = 1
    """1: replicas share the optimizer's state; 2: the reduced gradients too."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's configuration, as in its JSON file."""
    source: str = "the DeepSpeed settings"
    """Where they were read, for messages."""

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            raise ValueError(f"{self.source}: ZeRO stage {self.stage!r} is not supported; use 1 or 2")
        for key, ours in _NOT_OURS.items():
            if self.extra.get(key, "auto") != "auto":
                raise ValueError(f"{self.source} sets {key!r}, which {ours} decides here; leave it out of the file")
        zero = self.extra.get("zero_optimization", {})
        if not isinstance(zero, Mapping):
            raise ValueError(f"{self.source}: zero_optimization must be a mapping, got {zero!r}")
        for key, allowed in _REFUSED.items():
            if zero.get(key) not in allowed:
                raise ValueError(f"{self.source} sets zero_optimization.{key}, which is not supported; leave it out")
        if zero.get("stage", self.stage) not in (self.stage, "auto"):
            raise ValueError(
                f"{self.source} sets zero_optimization.stage {zero['stage']!r} but data_parallel.stage is "
                f"{self.stage}; make them agree"
            )

    @classmethod
    def read(cls, path: Path, stage: Literal[1, 2] | None = None) -> "ZeroSettings":
        """From DeepSpeed's JSON file; the stage too, unless it is given."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(
                f"DeepSpeed configuration {path} does not exist; the shipped ones are in configs/deepspeed/"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"DeepSpeed configuration {path} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"DeepSpeed configuration {path} holds a {type(content).__name__}; it must be an object")
        zero = content.get("zero_optimization")
        written: Any = zero.get("stage", "auto") if isinstance(zero, dict) else "auto"
        found: Any = 1 if written == "auto" else written
        return cls(stage or found, content, str(path))

    def check_clipping(self, clip_norm: float | None) -> None:
        """Raise if the settings clip to another norm than `clip_norm`."""
        given = self.extra.get("gradient_clipping", "auto")
        if given != "auto" and given != (clip_norm or 0.0):
            ours = "null" if clip_norm is None else f"{clip_norm:g}"
            raise ValueError(
                f"{self.source} sets gradient_clipping {given!r} but training.clip_norm is {ours}; make them agree "
                "(0.0 in the file is null here), or leave it out of the file"
            )

    def build(self, clip_norm: float | None, num_weights: int = BUCKET_ELEMENTS) -> dict[str, Any]:
        """DeepSpeed's configuration of a stage of so many weights."""
        self.check_clipping(clip_norm)
        extra = {key: value for key, value in self.extra.items() if value != "auto"}
        zero = {key: value for key, value in extra.pop("zero_optimization", {}).items() if value != "auto"}
        return {
            "steps_per_print": STEPS_PER_PRINT,
            "zero_allow_untested_optimizer": True,
            **extra,
            # A step is one call here: micro-batches are averaged by the pipeline before DeepSpeed sees anything.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": clip_norm or 0.0,  # it clips to 1.0 unless told otherwise
            "zero_optimization": {
                "reduce_bucket_size": min(BUCKET_ELEMENTS, num_weights),
                # Without clipping the norm is not needed: one message between replicas less in every step.
                "compute_grad_norm": bool(clip_norm),
                **zero,
                "stage": self.stage,
            },
        }


def import_deepspeed(device_type: str) -> Any:
    """DeepSpeed for this kind of device, quiet, without compiling anything."""
    if find_spec("deepspeed") is None:
        raise ValueError("data_parallel.sharding deepspeed needs DeepSpeed; pip install 'mpc_dist[deepspeed]'")
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # DeepSpeed calls it by the name that torch 2.13 is about to drop.
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor", FutureWarning)
    # It would compile a shared-memory message op for CPUs, a minute at the first launch, that ZeRO does not use.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def check_settings(settings: ZeroSettings, clip_norm: float | None, device_type: str) -> None:
    """Raise if DeepSpeed is missing or does not take these settings."""
    import_deepspeed(device_type)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**settings.build(clip_norm)["zero_optimization"])
    except ValueError as error:
        raise ValueError(f"{settings.source}: DeepSpeed does not take zero_optimization: {error}") from error


def check_weights(parameters: Iterable[Tensor]) -> None:
    """Raise unless DeepSpeed can share an optimizer of these."""
    wrong = next((p.dtype for p in parameters if p.requires_grad and p.dtype != torch.float32), None)
    if wrong is not None:
        raise ValueError(f"DeepSpeed's ZeRO keeps weights in float32 here, got {wrong}; use training.precision float32")


@dataclass(frozen=True)
class _Groups:
    """The ranks' groups in the form in which DeepSpeed asks for them."""

    data: dist.ProcessGroup
    stages: dist.ProcessGroup | None
    """Over whose ranks the gradients' norm is summed, too; None: it is the stage's own."""

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.stages

    def get_model_parallel_world_size(self) -> int:
        return 1 if self.stages is None else dist.get_world_size(self.stages)

    def get_model_parallel_rank(self) -> int:
        return 0 if self.stages is None else dist.get_rank(self.stages)


class ZeroOptimizer:
    """Reduces a stage's gradients over its replicas and updates its weights, each replica its part of them.

    The given torch optimizer goes on to hold the learning rate and the state, but of this rank's part only. A parameter
    that got no gradient in a step counts as one with a gradient of zero.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        modules: nn.Module,
        settings: ZeroSettings,
        *,
        group: dist.ProcessGroup,
        clip_norm: float | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """`modules` hold the optimizer's parameters; with `stages`, it is the norm over all stages that is clipped."""
        parameters = [p for entry in optimizer.param_groups for p in entry["params"]]
        self._named = {name: p for name, p in modules.named_parameters() if p.requires_grad}
        self._group_of = {id(p): index for index, e in enumerate(optimizer.param_groups) for p in e["params"]}
        if stages is not None:
            for parameter in parameters:
                parameter.model_parallel = True  # else DeepSpeed leaves it out of the sum over stages
        deepspeed = import_deepspeed(parameters[0].device.type)
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=modules,
            optimizer=optimizer,
            mpu=_Groups(group, stages),
            config=settings.build(clip_norm, sum(parameter.numel() for parameter in parameters)),
            dist_init_required=False,
        )
        for hook in self._zero._grad_acc_hooks:
            hook.remove()
        self.optimizer = optimizer

    def expect(self, parameters: Sequence[nn.Parameter], coming: Sequence[nn.Parameter]) -> None:
        """Nothing: DeepSpeed would wait for each message, in the middle of a backward."""

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce these gradients, which are complete on this replica; stage 2 keeps its part and frees the others."""
        self._zero.setup_buckets()
        for parameter in parameters:
            if parameter.grad is None:
                # Another replica may have one: all must put the same parameters into the same places.
                parameter.grad = torch.zeros_like(parameter)
            self._zero.reduce_ready_partitions_and_remove_grads(parameter, self._group_of[id(parameter)])
        if self._zero.partition_gradients:
            self._zero.reduce_ipg_grads()

    def finish(self) -> Sequence[Travel]:
        """Reduce what still waits in a bucket, and lay this rank's part of the gradients out for the update."""
        self._zero.setup_buckets()
        self._zero.overlapping_partition_gradients_reduce_epilogue()
        return ()  # DeepSpeed does not tell

    def step(self) -> None:
        """Clip, update this rank's part of the weights, and gather the replicas' parts."""
        self._engine.step()

    @property
    def master_bytes(self) -> int:
        """What the copy of this rank's part of the weights takes; DeepSpeed keeps one in float32 always."""
        return sum(part.nbytes for part in self._zero.single_partition_of_fp32_groups)

    @property
    def bucket_bytes(self) -> int:
        """What gradients on their way to other replicas take: DeepSpeed's buffer for them."""
        elements = self._zero.reduce_bucket_size if self._zero.contiguous_gradients else 0
        return int(elements) * torch.float32.itemsize

    def own_state(self) -> dict[str, dict[str, Tensor | Fragment]]:
        """This rank's part of the state of every parameter by name, and counts of steps; empty before the first."""
        return {name: self._own_entries(parameter) for name, parameter in self._named.items()}

    def load_full_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from this state and from the weights as they are in the modules now; each replica takes its part."""
        if set(state) != set(self._named):
            odd = sorted(set(state) ^ set(self._named))
            raise ValueError(f"the optimizer's state is of other parameters; they differ by {', '.join(odd[:5])}")
        self._zero.refresh_fp32_params()
        for name, parameter in self._named.items():
            flat = self._flat(parameter)
            entries = self.optimizer.state[flat]
            for key, value in state[name].items():
                if value.shape != parameter.shape:  # a count of steps
                    entries[key] = value.clone()
                    continue
                part = entries.setdefault(key, torch.zeros_like(flat, requires_grad=False))
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                    own = value.reshape(-1).narrow(0, there.start, there.numel)
                    part.narrow(0, here.start, here.numel).copy_(own)

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the weights of that parameter's group."""
        flat: Tensor = self._zero.single_partition_of_fp32_groups[self._group_of[id(parameter)]]
        return flat

    def _own_entries(self, parameter: nn.Parameter) -> dict[str, Tensor | Fragment]:
        flat = self._flat(parameter)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        found: dict[str, Tensor | Fragment] = {}
        for key, value in self.optimizer.state.get(flat, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != flat.shape:
                found[key] = value
            elif mapping is not None:  # else it lies with the other replicas
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                found[key] = Fragment(value.narrow(0, here.start, here.numel), there.start, tuple(parameter.shape))
        return found
