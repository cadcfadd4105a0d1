"""A model of Hugging Face's transformers as a model family: each rank builds and reads only its own blocks.

Tied embeddings are untied: the embedding in block 0 and the head at the last boundary are two copies, each with its
own gradient (transformers' is their sum), and are written back as two.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpc_dist.models.hugging_face.architecture import ARCHITECTURES, Architecture, LayerBlock, NormedHead
from mpc_dist.models.hugging_face.checkpoint import WeightFiles, read_config
from mpc_dist.task import Task
from mpc_dist.validation import look_up, suggest

logger = logging.getLogger(__name__)

Weights = Literal["pretrained", "fresh_head", "random"]
Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class HuggingFace:
    """A GPT-2, Llama, ViT or ResNet of transformers; blocks are its layers."""

    name: Literal["hf"] = "hf"
    """Model family."""
    path: str | None = None
    """A folder of save_pretrained or a hub id: gives the configuration, and the weights unless they are random."""
    architecture: str | None = None
    """gpt2, llama, vit or resnet: transformers' default configuration, with random weights; with a path, what is
    expected there."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration to change, e.g. {n_layer: 4, vocab_size: 256} or {num_labels: 10}."""
    weights: Weights | None = None
    """pretrained: read from the path (the default with one); fresh_head: all but the last linear map, which is drawn
    anew, e.g. for other classes; random: drawn from the seed as transformers does (the default without a path)."""

    def __post_init__(self) -> None:
        if self.path is None and self.architecture is None:
            raise ValueError("model 'hf' needs model.path (a folder or a hub id) or model.architecture; give one")
        if self.architecture is not None:
            look_up("model.architecture", self.architecture, ARCHITECTURES)
        if self.path is None and self.weights not in (None, "random"):
            raise ValueError(f"model.weights {self.weights!r} are read from a model.path, but there is none; give one")

    @property
    def num_blocks(self) -> int:
        """The layers of the model."""
        return len(self.table.places(self.config))

    @cached_property
    def config(self) -> Any:
        """The configuration in transformers' own type."""
        config = read_config(self.path, self.architecture, self.overrides)
        kind = config.model_type
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"{self.path} is a {kind!r}, which cannot be cut into blocks; {suggest(kind, ARCHITECTURES)}"
            )
        if self.architecture not in (None, kind):
            raise ValueError(f"{self.path} is a {kind}, but model.architecture is {self.architecture}; make them agree")
        if getattr(config, "add_cross_attention", False):
            raise ValueError("a model with cross attention has two inputs and is no chain; use a decoder-only one")
        if kind != "resnet":
            # With this one causal masks follow from the layer itself, in transformers as here.
            config._attn_implementation = "sdpa"
        return config

    @property
    def table(self) -> Architecture:
        """The architecture's row of the table."""
        return ARCHITECTURES[self.config.model_type]

    @property
    def has_fresh_head(self) -> bool:
        """Whether the last linear map is drawn anew instead of read."""
        return self._weights != "pretrained"

    def check_task(self, task: Task) -> None:
        """Accept the kind of task of the architecture, if its sizes agree; and look for the weights."""
        config, kind = self.config, self.config.model_type
        if task.kind != self.table.kind:
            wanted = {"tokens": "'text' or 'hf_text'", "classification": "'image_folder', 'hf_images' or 'cifar10'"}
            raise ValueError(
                f"{kind} is for {self.table.kind}, but the data is {task.kind}; use data {wanted[self.table.kind]}"
            )
        if task.kind == "tokens":
            (context,) = task.input_shape
            _check_at_most("data.context", context, "max_position_embeddings", config)
            _check_at_most("the data's vocabulary of", task.num_outputs, "vocab_size", config)
        else:
            _check_equal("classes", task.num_outputs, "num_labels", config)
            if self._files is not None and self.has_fresh_head is False:
                self._check_classes(task)
            if len(task.input_shape) != 3:
                raise ValueError(f"{kind} takes images (channels, height, width), but the data has {task.input_shape}")
            _check_equal("channels", task.input_shape[0], "num_channels", config)
            if kind == "vit":
                size = config.image_size if isinstance(config.image_size, int) else tuple(config.image_size)
                found = task.input_shape[1] if task.input_shape[1] == task.input_shape[2] else task.input_shape[1:]
                _check_equal("pixels a side", found, "image_size", config, size)
        self._check_layers()

    def width_at(self, boundary: int, task: Task) -> int:  # noqa: ARG002
        """Features of the layer that ends there; for ResNets, channels."""
        return self.table.widths(self.config)[boundary - 1]

    def build_block(self, index: int, task: Task) -> nn.Module:  # noqa: ARG002
        """Layer `index`, with the stem before it for index 0."""
        block = self._fill(lambda: self.build_empty_block(index), f"blocks.{index}.")
        block.rotary = self.table.build_rotary(self.config)
        return block

    def build_empty_block(self, index: int) -> LayerBlock:
        """The modules of block `index` as torch initialises them, and without what has no weights."""
        stem = self.table.build_stem(self.config) if index == 0 else None
        return LayerBlock(self.table.build_layer(self.config, index), stem=stem)

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """Final norm and linear map: the model's own at the last boundary, else of that kind and drawn anew."""
        config, table, width = self.config, self.table, self.width_at(boundary, task)
        outputs = config.vocab_size if table.kind == "tokens" else config.num_labels

        def build() -> NormedHead:
            linear = nn.Linear(width, outputs, bias=table.has_bias)
            return NormedHead(table.build_norm(config), linear, table.reads)

        if boundary < self.num_blocks:
            return self._draw(build)
        if self._is_tied:
            logger.warning(
                "tied embeddings are untied: block 0 and the head at boundary %d train as two copies", boundary
            )
        return self._fill(build, f"readouts.{boundary}.")

    def hub_name(self, name: str) -> str:
        """What transformers calls the parameter that a chain calls `blocks.3.layer.…`."""
        return self.table.rename(name, self.config)

    @property
    def _weights(self) -> Weights:
        return self.weights or ("random" if self.path is None else "pretrained")

    @property
    def _is_tied(self) -> bool:
        return self.table.tied is not None and bool(self.config.tie_word_embeddings) and self._weights == "pretrained"

    @cached_property
    def _files(self) -> WeightFiles | None:
        if self._weights == "random":
            return None
        assert self.path is not None
        return WeightFiles(self.path)

    def _draw(self, build: Callable[[], Part]) -> Part:
        """Build with weights as transformers draws them; of fake tensors there are only shapes, and nothing to draw."""
        if _is_fake():
            return build()
        whole = getattr(importlib.import_module(self.table.module), self.table.whole)
        # The base class holds no layers, only the rule of how each kind of module is initialised.
        rule = whole.__mro__[1](self.config)
        with torch.no_grad():
            return build().apply(rule._init_weights)

    def _fill(self, build: Callable[[], Part], prefix: str) -> Part:
        """Build with the weights of the files, or drawn where there are none to read."""
        if self._files is None or _is_fake():
            return self._draw(build)
        drawn = {}
        if self.has_fresh_head and prefix.startswith("readouts."):
            head = self._draw(build).state_dict()
            drawn = {name: value for name, value in head.items() if name.startswith("linear.")}
        with torch.device("meta"):
            part = build()
        own = {name: value for name, value in part.state_dict().items() if name not in drawn}
        tensors = self._read_part(self._files, prefix, own)
        part.load_state_dict(drawn | tensors, assign=True)
        return part

    def _read_part(self, files: WeightFiles, prefix: str, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a part by their names in it, in the default precision, checked against the part's own."""
        where = {name: self._find(files, prefix + name) for name in own}
        found = files.read({place for place in where.values() if place is not None})
        out = {}
        for name, like in own.items():
            place = where[name]
            if place is None and name.endswith("num_batches_tracked"):
                out[name] = torch.zeros((), dtype=like.dtype)  # files of older torch lack this counter
                continue
            given = "missing" if place is None else tuple(found[place].shape)
            if place is None or given != tuple(like.shape):
                raise ValueError(
                    f"{self.path} does not fit: {self.hub_name(prefix + name)} is {given} there, {tuple(like.shape)} "
                    "in the model; leave out model.overrides that change sizes"
                    + (", or set model.weights to fresh_head" if name.startswith("linear.") else "")
                )
            # A copy: what is read may be a view of a file that is mapped into memory, or serve two parts.
            out[name] = found[place].to(like.dtype, copy=True)
        return out

    def _find(self, files: WeightFiles, name: str) -> str | None:
        """The name of a parameter in the files; of a tied one that they leave out, the embedding's."""
        wanted = self.hub_name(name)
        tied = self.table.tied
        names = [*self.table.names_in_files(wanted)]
        if tied is not None and wanted == tied[0] and self.config.tie_word_embeddings:
            names += self.table.names_in_files(tied[1])
        return next((one for one in names if one in files), None)

    def _check_layers(self) -> None:
        """Raise if the files hold more layers than the model, which would be lost without a word."""
        if self._files is None:
            return
        held = set(self._files.names)
        beyond = self.table.names_in_files(self.table.prefixes["layer"].format(self._place_after_last()) + ".")
        extra = next((name for name in sorted(held) for one in beyond if name.startswith(one)), None)
        if extra is not None:
            raise ValueError(
                f"{self.path} holds {extra}, but the model has {self.num_blocks} layers; leave out model.overrides "
                "that change their number"
            )

    def _place_after_last(self) -> str:
        *stage, last = self.table.places(self.config)[-1].split(".")
        return ".".join([*stage, str(int(last) + 1)])

    def _check_classes(self, task: Task) -> None:
        """A classifier of other classes is found before the ranks meet."""
        assert self._files is not None
        name = f"readouts.{self.num_blocks}.linear.bias"
        place = self._find(self._files, name)
        held = 0 if place is None else len(self._files.read([place])[place])
        if held != task.num_outputs:
            has = f"a classifier of {held} classes" if held else "no classifier"
            raise ValueError(
                f"{self.path} has {has}, but the data {task.num_outputs} classes; set model.weights to fresh_head to "
                f"train a new one"
            )


def _is_fake() -> bool:
    """Whether tensors made here have shapes only."""
    return isinstance(torch.empty(0), FakeTensor)


def _check_at_most(what: str, value: int, limit: str, config: Any) -> None:
    if value > getattr(config, limit):
        raise ValueError(
            f"{what} {value} exceeds the model's {limit} {getattr(config, limit)}; use less, or set "
            f"model.overrides.{limit} for random weights"
        )


def _check_equal(what: str, value: object, limit: str, config: Any, size: object = None) -> None:
    expected = getattr(config, limit) if size is None else size
    if value != expected:
        raise ValueError(
            f"the data has {value} {what}, the model's {limit} is {expected}; make them agree (model.overrides.{limit} "
            f"or the data's settings)"
        )
