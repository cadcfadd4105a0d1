"""Small models of transformers, whole and with random weights: what chains are compared with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpc_dist.models import HuggingFace
from mpc_dist.task import Task

TOKENS = Task("tokens", (7,), 11)
IMAGES = Task("classification", (3, 8, 8), 5)
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8, **NO_DROPOUT}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
RESNET: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 2], "num_labels": 5}

EXAMPLES: dict[str, tuple[str, dict[str, Any], Task]] = {
    "gpt2": ("gpt2", {**GPT2, "tie_word_embeddings": False}, TOKENS),
    "gpt2, tied": ("gpt2", GPT2, TOKENS),
    "llama": ("llama", LLAMA, TOKENS),
    "llama, tied, padded": ("llama", {**LLAMA, "tie_word_embeddings": True, "pad_token_id": 3}, TOKENS),
    "vit": ("vit", VIT, IMAGES),
    "resnet, basic": ("resnet", {**RESNET, "layer_type": "basic"}, IMAGES),
    "resnet, bottleneck": ("resnet", {**RESNET, "layer_type": "bottleneck"}, IMAGES),
    "resnet, other strides": (
        "resnet",
        {**RESNET, "downsample_in_first_stage": True, "downsample_in_bottleneck": True},
        IMAGES,
    ),
}


def build_whole(name: str) -> Any:
    """The model as transformers builds it, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

    architecture, fields, task = EXAMPLES[name]
    config = AutoConfig.for_model(architecture, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kind = AutoModelForCausalLM if task.kind == "tokens" else AutoModelForImageClassification
        whole = kind.from_config(config)
        # Norms and biases begin as ones and zeros, which would hide one that is left out.
        for parameter in whole.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return whole.train()


def save_whole(name: str, folder: Path, **arguments: Any) -> tuple[Any, HuggingFace, Task]:
    """The same in a folder of `save_pretrained`, and the model that reads it."""
    whole = build_whole(name)
    whole.save_pretrained(folder, **arguments)
    return whole, HuggingFace(path=str(folder)), EXAMPLES[name][2]


def draw_for_whole(task: Task, *, batch_size: int = 4) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs and labels for a chain, and the same batch as transformers takes it: it moves labels itself."""
    generator = torch.Generator().manual_seed(0)
    if task.kind == "tokens":
        (context,) = task.input_shape
        text = torch.randint(0, task.num_outputs, (batch_size, context + 1), generator=generator)
        return text[:, :-1], text[:, 1:], {"input_ids": text, "labels": text}
    images = torch.randn(batch_size, *task.input_shape, generator=generator)
    classes = torch.randint(0, task.num_outputs, (batch_size,), generator=generator)
    return images, classes, {"pixel_values": images, "labels": classes}
