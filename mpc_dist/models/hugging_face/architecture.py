"""The architectures of transformers that can be cut into blocks, as a table: their parts, and what those are called.

A block is one layer, with the stem (embedding) before it in block 0; the head is the final norm and the last linear
map. transformers is imported where it is needed only: it takes seconds.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpc_dist.task import TaskKind

Reads = Literal["every position", "first position", "mean over space"]
"""What a head makes its prediction of."""


class LayerBlock(nn.Module):
    """A layer of transformers as a block: one tensor in, one tensor out."""

    def __init__(self, layer: nn.Module, *, stem: nn.Module | None = None, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = stem
        self.layer = layer
        self.rotary = rotary
        """Rotary position embeddings, computed in every block; they have no weights."""

    def forward(self, state: Tensor) -> Tensor:
        """Map raw inputs (with a stem) or a state to the next state. Attention is causal where the layer says so."""
        if self.stem is not None:
            state = self.stem(state)
        extra = {}
        if self.rotary is not None:
            positions = torch.arange(state.shape[1], device=state.device)[None]
            extra["position_embeddings"] = self.rotary(state, positions)
        out: Tensor = self.layer(state, **extra)
        return out


class PositionedEmbedding(nn.Module):
    """GPT-2's stem: token and position embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, positions) to states (batch, positions, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        state: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return state


class NormedHead(nn.Module):
    """The final norm, if the architecture has one, and a linear map to the label's dimension."""

    def __init__(self, norm: nn.Module | None, linear: nn.Linear, reads: Reads) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear
        self._reads = reads

    def forward(self, state: Tensor) -> Tensor:
        """Map (batch, positions, width) or (batch, width, height, width) to logits (..., num_outputs)."""
        if self.norm is not None:
            state = self.norm(state)
        if self._reads == "first position":
            state = state[:, 0]
        elif self._reads == "mean over space":
            state = nn.functional.adaptive_avg_pool2d(state, 1).flatten(1)
        prediction: Tensor = self.linear(state)
        return prediction


@dataclass(frozen=True)
class Architecture:
    """How a class of transformers becomes a chain. Builders take the transformers configuration."""

    kind: TaskKind
    """What it can be trained for."""
    auto_class: str
    """The class of transformers that loads the whole."""
    whole: str
    """The class of the whole model, in `module`."""
    module: str
    """Where transformers defines it."""
    prefixes: Mapping[str, str]
    """What the children of our blocks and head are called in the whole model; a layer's has its place to fill in."""
    reads: Reads
    build_stem: Callable[[Any], nn.Module]
    build_layer: Callable[[Any, int], nn.Module]
    build_norm: Callable[[Any], nn.Module | None]
    build_rotary: Callable[[Any], nn.Module | None] = lambda _: None
    has_bias: bool = True
    """Whether the last linear map has one."""
    tied: tuple[str, str] | None = None
    """(the head's weight, the embedding that it is when `tie_word_embeddings`)."""
    in_files: tuple[tuple[str, str], ...] = ()
    """Regular expressions that turn a name of the module into the one that weight files use."""
    widths: Callable[[Any], list[int]] = lambda config: [config.hidden_size] * config.num_hidden_layers
    """Features after each layer."""
    places: Callable[[Any], list[str]] = lambda config: [str(index) for index in range(config.num_hidden_layers)]
    """What to fill in for each layer."""

    def name_of_layer(self, config: Any, index: int) -> str:
        """The path of layer `index` in the whole model."""
        return self.prefixes["layer"].format(self.places(config)[index])

    def rename(self, name: str, config: Any) -> str:
        """The name in the whole model of what a chain calls `blocks.3.layer.…` or `readouts.12.norm.…`."""
        _, index, child, rest = name.split(".", 3)
        prefix = self.name_of_layer(config, int(index)) if child == "layer" else self.prefixes[child]
        return f"{prefix}.{rest}"

    def names_in_files(self, name: str) -> list[str]:
        """What a weight file may call it: the model's names or older ones, with or without the base model's prefix."""
        older = name
        for pattern, replacement in self.in_files:
            older = re.sub(pattern, replacement, older)
        return [*dict.fromkeys(one for full in (name, older) for one in (full, full.partition(".")[2]))]


def _gpt2_layer(config: Any, index: int) -> nn.Module:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    layer: nn.Module = GPT2Block(config, layer_idx=index)  # type: ignore[no-untyped-call]
    return layer


def _llama_layer(config: Any, index: int) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layer: nn.Module = LlamaDecoderLayer(config, index)
    return layer


def _llama_norm(config: Any) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    return norm


def _llama_rotary(config: Any) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # Its frequencies are no weights and in no file: they are computed even where weights are left out for now.
    with torch.device("cpu"):
        rotary: nn.Module = LlamaRotaryEmbedding(config)
    return rotary


def _vit_stem(config: Any) -> nn.Module:
    from transformers.models.vit.modeling_vit import ViTEmbeddings

    stem: nn.Module = ViTEmbeddings(config)
    return stem


def _vit_layer(config: Any, _: int) -> nn.Module:
    from transformers.models.vit.modeling_vit import ViTLayer

    layer: nn.Module = ViTLayer(config)
    return layer


def _resnet_stem(config: Any) -> nn.Module:
    from transformers.models.resnet.modeling_resnet import ResNetEmbeddings

    stem: nn.Module = ResNetEmbeddings(config)
    return stem


def _resnet_layer(config: Any, index: int) -> nn.Module:
    """What transformers' ResNetStage builds in that place, alone."""
    from transformers.models.resnet.modeling_resnet import ResNetBasicLayer, ResNetBottleNeckLayer

    stage, place = (int(part) for part in _resnet_places(config)[index].split(".layers."))
    width = config.hidden_sizes[stage]
    before = width if place else [config.embedding_size, *config.hidden_sizes][stage]
    halves = place == 0 and (stage > 0 or config.downsample_in_first_stage)
    arguments: dict[str, Any] = {"stride": 2 if halves else 1, "activation": config.hidden_act}
    if config.layer_type == "bottleneck":
        layer: nn.Module = ResNetBottleNeckLayer(
            before, width, downsample_in_bottleneck=config.downsample_in_bottleneck, **arguments
        )
        return layer
    basic: nn.Module = ResNetBasicLayer(before, width, **arguments)
    return basic


def _resnet_places(config: Any) -> list[str]:
    return [f"{stage}.layers.{place}" for stage, depth in enumerate(config.depths) for place in range(depth)]


def _resnet_widths(config: Any) -> list[int]:
    return [width for width, depth in zip(config.hidden_sizes, config.depths, strict=True) for _ in range(depth)]


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture(
        kind="tokens",
        auto_class="AutoModelForCausalLM",
        whole="GPT2LMHeadModel",
        module="transformers.models.gpt2.modeling_gpt2",
        prefixes={
            "stem": "transformer",
            "layer": "transformer.h.{}",
            "norm": "transformer.ln_f",
            "linear": "lm_head",
        },
        reads="every position",
        build_stem=PositionedEmbedding,
        build_layer=_gpt2_layer,
        build_norm=lambda config: nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon),
        has_bias=False,
        tied=("lm_head.weight", "transformer.wte.weight"),
    ),
    "llama": Architecture(
        kind="tokens",
        auto_class="AutoModelForCausalLM",
        whole="LlamaForCausalLM",
        module="transformers.models.llama.modeling_llama",
        prefixes={
            "stem": "model.embed_tokens",
            "layer": "model.layers.{}",
            "norm": "model.norm",
            "linear": "lm_head",
        },
        reads="every position",
        build_stem=lambda config: nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id),
        build_layer=_llama_layer,
        build_norm=_llama_norm,
        build_rotary=_llama_rotary,
        has_bias=False,
        tied=("lm_head.weight", "model.embed_tokens.weight"),
    ),
    "vit": Architecture(
        kind="classification",
        auto_class="AutoModelForImageClassification",
        whole="ViTForImageClassification",
        module="transformers.models.vit.modeling_vit",
        prefixes={
            "stem": "vit.embeddings",
            "layer": "vit.layers.{}",
            "norm": "vit.layernorm",
            "linear": "classifier",
        },
        reads="first position",
        build_stem=_vit_stem,
        build_layer=_vit_layer,
        build_norm=lambda config: nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
        in_files=(
            (r"\bvit\.layers\.", "vit.encoder.layer."),
            (r"attention\.q_proj", "attention.attention.query"),
            (r"attention\.k_proj", "attention.attention.key"),
            (r"attention\.v_proj", "attention.attention.value"),
            (r"attention\.o_proj", "attention.output.dense"),
            (r"mlp\.fc1", "intermediate.dense"),
            (r"mlp\.fc2", "output.dense"),
        ),
    ),
    "resnet": Architecture(
        kind="classification",
        auto_class="AutoModelForImageClassification",
        whole="ResNetForImageClassification",
        module="transformers.models.resnet.modeling_resnet",
        prefixes={
            "stem": "resnet.embedder",
            "layer": "resnet.encoder.stages.{}",
            "linear": "classifier.1",
        },
        reads="mean over space",
        build_stem=_resnet_stem,
        build_layer=_resnet_layer,
        build_norm=lambda _: None,
        widths=_resnet_widths,
        places=_resnet_places,
    ),
}
"""By transformers' `model_type`."""
