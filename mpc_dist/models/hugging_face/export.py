"""Writes a trained chain in the formats of transformers and peft, from its tensors by their names in the chain.

Readouts at interior boundaries are no part of a model of transformers and are left out.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpc_dist.models.hugging_face.checkpoint import WEIGHTS
from mpc_dist.models.hugging_face.lora import LoraConfig, build_peft_config
from mpc_dist.models.hugging_face.model import HuggingFace

ADAPTERS = "adapter_model.safetensors"


def write_pretrained(model: HuggingFace, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder that transformers' `from_pretrained` loads: config.json and safetensors.

    `state` holds the whole chain's parameters and buffers (`blocks.<i>.<name>`, `readouts.<last>.<name>`). Embedding
    and head are written as two (`tie_word_embeddings: false`). Adapters are left out: `write_adapters` writes them.
    """
    _check_free(folder, WEIGHTS)
    named = {
        model.hub_name(name.replace(".base_layer.", ".")): tensor.detach().contiguous().cpu()
        for name, tensor in _of_model(model, state)
        if ".lora_" not in name
    }
    whole = _build_without_memory(model, next(iter(named.values())).dtype if named else torch.float32)
    for name, like in whole.state_dict().items():
        given = tuple(named[name].shape) if name in named else "missing"
        if given != tuple(like.shape):
            raise ValueError(
                f"the state does not fit the model: {name} is {given}, expected {tuple(like.shape)}; give the "
                "parameters and buffers of all blocks and of the last readout, with their configuration"
            )
    whole.save_pretrained(folder, state_dict=named)


def write_adapters(model: HuggingFace, lora: LoraConfig, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder that peft's `from_pretrained` loads on the base model: adapters, and the last head if it is fresh.

    The base model is what model.path names; what `write_pretrained` wrote where its weights are random, and for
    ResNets, whose batch-norm statistics move in training (as they do under peft).
    """
    from safetensors.torch import save_file

    _check_free(folder, ADAPTERS)
    found = {}
    for name, tensor in _of_model(model, state):
        is_head = name.startswith("readouts.") and ".linear." in name and model.has_fresh_head
        if ".lora_" in name or is_head:
            key = model.hub_name(name).replace(".default", "")
            found[f"base_model.model.{key}"] = tensor.detach().contiguous().cpu()
    if not any(".lora_" in name for name in found):
        raise ValueError("the state holds no adapters; train with a lora section, or write the model as a whole")
    config = build_peft_config(model, lora, targets=list(lora.targets))
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(found, folder / ADAPTERS, metadata={"format": "pt"})


def _of_model(model: HuggingFace, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What belongs to the blocks and to the model's own head."""
    own = ("blocks.", f"readouts.{model.num_blocks}.")
    return ((name, tensor) for name, tensor in state.items() if name.startswith(own))


def _build_without_memory(model: HuggingFace, dtype: torch.dtype) -> Any:
    """The whole model of transformers with shapes only."""
    whole = getattr(importlib.import_module(model.table.module), model.table.whole)
    config = copy.deepcopy(model.config)
    if model.table.tied is not None:
        config.tie_word_embeddings = False
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return whole(config)
    finally:
        torch.set_default_dtype(default)


def _check_free(folder: Path, name: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder to write {name} into")
    if (folder / name).exists():
        raise ValueError(f"{folder} already holds {name}, which would be lost; give another folder, or remove it")
