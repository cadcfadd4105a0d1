"""Low-rank adapters through peft: per block, from the block's own seed, so they are the same for any partition.

Only adapters and fresh heads train: interior readouts, and the model's own last linear map where it was drawn anew.
Everything that was loaded is frozen, so no pass computes a gradient for it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpc_dist.models.block_model import BlockModel
from mpc_dist.models.hugging_face.model import HuggingFace
from mpc_dist.task import Task
from mpc_dist.validation import check_real, check_whole


@dataclass(frozen=True)
class LoraConfig:
    """Adapters for model 'hf': W + (alpha / r) B A, of which only A and B train."""

    r: int = 0
    """Rank of the adapters; 0: none, all weights train."""
    alpha: int = 16
    """Scale of the adapters, times r."""
    targets: tuple[str, ...] = ()
    """Modules to adapt, by the end of their names in transformers, e.g. [q_proj,v_proj] or [attn.c_attn]."""
    dropout: float = 0.0
    """Probability of dropping a feature of an adapter's input."""

    def __post_init__(self) -> None:
        check_whole("lora.r", self.r, minimum=0)
        check_whole("lora.alpha", self.alpha, minimum=1)
        check_real("lora.dropout", self.dropout, minimum=0, maximum=1)
        if self.r and not self.targets:
            raise ValueError("lora.targets is empty; list modules to adapt, e.g. [q_proj,v_proj]")
        if self.targets and not self.r:
            raise ValueError(f"lora.targets {list(self.targets)} need a rank; set lora.r to 1 or more")


def adapt(model: BlockModel, lora: LoraConfig) -> BlockModel:
    """The model with adapters; the model itself if the rank is 0."""
    if not lora.r:
        return model
    if not isinstance(model, HuggingFace):
        raise ValueError(f"lora adapts model 'hf', not {type(model).__name__}; leave lora out, or use model 'hf'")
    adapted = AdaptedModel(model, lora)
    adapted.check_targets()
    return adapted


@dataclass(frozen=True)
class AdaptedModel:
    """A model of transformers whose blocks have adapters."""

    model: HuggingFace
    lora: LoraConfig

    @property
    def num_blocks(self) -> int:
        """Those of the model."""
        return self.model.num_blocks

    def check_task(self, task: Task) -> None:
        """Accept what the model accepts."""
        self.model.check_task(task)

    def width_at(self, boundary: int, task: Task) -> int:
        """That of the model."""
        return self.model.width_at(boundary, task)

    def build_block(self, index: int, task: Task) -> nn.Module:
        """The model's block, frozen, with adapters on its targets."""
        from peft import inject_adapter_in_model

        block = self.model.build_block(index, task).requires_grad_(False)
        found = {name: part for name, part in self._adaptable(block, index).items() if self._is_target(name)}
        if found:
            own = {id(module): name for name, module in block.named_modules()}
            places = [own[id(part)] for part in found.values()]
            inject_adapter_in_model(build_peft_config(self.model, self.lora, targets=places), block)
        return block

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """The model's head; at the last boundary only a fresh linear map trains."""
        head = self.model.build_head(boundary, task)
        if boundary == self.num_blocks:
            head.requires_grad_(False)
            head.linear.requires_grad_(self.model.has_fresh_head)
        return head

    def check_targets(self) -> None:
        """Raise if a target matches no module of any block."""
        known: set[str] = set()
        with torch.device("meta"):
            for index in range(self.num_blocks):
                block = self.model.build_empty_block(index)
                known |= self._adaptable(block, index).keys()
        for target in self.lora.targets:
            if not any(_ends_in(name, target) for name in known):
                short = {name.removeprefix(self._layer_of(name)) for name in known}
                raise ValueError(
                    f"lora.targets has {target!r}, which matches no module of any block; there are "
                    f"{', '.join(sorted(short))}"
                )

    def _layer_of(self, name: str) -> str:
        """The path of the layer that a module is in, with a dot; nothing for those of the stem."""
        table, config = self.model.table, self.model.config
        layers = (f"{table.name_of_layer(config, index)}." for index in range(self.num_blocks))
        return next((layer for layer in layers if name.startswith(layer)), "")

    def _is_target(self, name: str) -> bool:
        return any(_ends_in(name, target) for target in self.lora.targets)

    def _adaptable(self, block: nn.Module, index: int) -> dict[str, nn.Module]:
        """The modules that peft can adapt, by their names in the whole model."""
        from transformers.pytorch_utils import Conv1D

        kinds = (nn.Linear, nn.Conv2d, nn.Embedding, Conv1D)
        return {
            self.model.hub_name(f"blocks.{index}.{name}.").removesuffix("."): module
            for name, module in block.named_modules()
            if isinstance(module, kinds)
        }


def build_peft_config(model: HuggingFace, lora: LoraConfig, *, targets: list[str]) -> Any:
    """The same settings in peft's type."""
    try:
        from peft import LoraConfig as PeftLoraConfig
    except ImportError as error:
        raise ValueError("lora needs peft; pip install 'mpc_dist[hf]'") from error
    is_gpt2 = model.config.model_type == "gpt2"
    return PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=lora.dropout,
        fan_in_fan_out=is_gpt2,  # its Conv1D keeps weights transposed
        task_type="CAUSAL_LM" if model.table.kind == "tokens" else None,
        base_model_name_or_path=model.path,
        modules_to_save=[model.table.prefixes["linear"]] if model.has_fresh_head else None,
    )


def _ends_in(name: str, target: str) -> bool:
    """As peft matches a list of targets."""
    return name == target or name.endswith(f".{target}")
