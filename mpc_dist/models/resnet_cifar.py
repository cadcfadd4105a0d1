"""ResNets for 32 x 32 images: three groups of n two-convolution residual blocks (He et al. 2015, section 4.2).

n = 9 is ResNet-56, n = 10 the paper's ResNet-62. The stem is part of block 0, the classifier is the last readout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.readout import LinearHead
from mpc_dist.task import Task
from mpc_dist.validation import MAX_WIDTH, check_path, check_whole
from mpc_dist.windows import MAX_BLOCKS


class Stem(nn.Module):
    """The first convolution: image channels to the first group's."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)

    def forward(self, image: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H, W)."""
        return F.relu(self.bn1(self.conv1(image)))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with batch norm, and a shortcut without weights: stride and zero padding (option A)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.padding = (out_channels - in_channels) // 2

    def forward(self, state: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H / stride, W / stride)."""
        out = F.relu(self.bn1(self.conv1(state)))
        out = self.bn2(self.conv2(out))
        shortcut = state[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + shortcut)


@dataclass(frozen=True)
class ResNetCifar:
    """Residual network for small images with 6n + 2 layers, a block per residual block."""

    name: Literal["resnet_cifar"] = "resnet_cifar"
    """Model family."""
    blocks_per_group: int = 10
    """Residual blocks in each of the three groups (n): 9 is ResNet-56, 10 is ResNet-62."""
    channels: int = 16
    """Channels of the first group; the second and third have twice and four times as many."""
    checkpoint: str | None = None
    """A trained ResNet in the layout of akamaster/pytorch_resnet_cifar10 to start from (a .th file)."""
    weights: Literal["pretrained", "fresh_head"] = "pretrained"
    """What is read of the checkpoint. pretrained: all; fresh_head: the blocks, while the head is drawn anew from the
    seed, e.g. for other classes."""

    def __post_init__(self) -> None:
        check_whole("model.blocks_per_group", self.blocks_per_group, minimum=1, maximum=MAX_BLOCKS // 3)
        check_whole("model.channels", self.channels, minimum=2, maximum=MAX_WIDTH)
        if self.checkpoint is not None:
            check_path("model.checkpoint", self.checkpoint)
        if self.channels % 2:
            raise ValueError(f"model.channels {self.channels} must be even: shortcuts pad by half on each side")
        if self.weights == "fresh_head" and self.checkpoint is None:
            raise ValueError("model.weights 'fresh_head' are read from a model.checkpoint, but there is none; give one")

    @property
    def num_blocks(self) -> int:
        """Three groups."""
        return 3 * self.blocks_per_group

    def check_task(self, task: Task) -> None:
        """Accept images with channels first."""
        if task.kind != "classification" or len(task.input_shape) != 3:
            raise ValueError(
                f"resnet_cifar classifies images (channels, height, width), but the data is {task.kind} on "
                f"{task.input_shape}; use data 'cifar10', 'cifar100' or 'digits'"
            )

    def width_at(self, boundary: int, task: Task) -> int:  # noqa: ARG002
        """Channels of the group that ends or passes there."""
        return self.channels << (boundary - 1) // self.blocks_per_group

    def build_block(self, index: int, task: Task) -> nn.Module:
        """Residual block `index`, with the stem before it for index 0."""
        channels = self.width_at(index + 1, task)
        if index == 0:
            stem = Stem(task.input_shape[0], channels)
            block: nn.Module = nn.Sequential(stem, ResidualBlock(channels, channels, stride=1))
        else:
            before = self.width_at(index, task)
            block = ResidualBlock(before, channels, stride=1 if before == channels else 2)
        return self._load_trained(block.apply(_initialise), f"blocks.{index}.")

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """Global average pooling and a linear classifier."""
        head = LinearHead(self.width_at(boundary, task), task.num_outputs).apply(_initialise)
        is_trained = boundary == self.num_blocks and self.weights == "pretrained"
        return self._load_trained(head, f"readouts.{boundary}.") if is_trained else head

    @cached_property
    def _trained(self) -> dict[str, Tensor] | None:
        """The checkpoint's tensors by their names in a chain, or None without a checkpoint."""
        if self.checkpoint is None:
            return None
        return read_akamaster(Path(self.checkpoint), blocks_per_group=self.blocks_per_group)

    def _load_trained(self, module: nn.Module, prefix: str) -> nn.Module:
        if self._trained is None:
            return module
        part = {key.removeprefix(prefix): value for key, value in self._trained.items() if key.startswith(prefix)}
        for key, own in module.state_dict().items():
            if key.endswith("num_batches_tracked"):
                continue  # files of older torch lack this counter
            given = tuple(part[key].shape) if key in part else "missing"
            if given != tuple(own.shape):
                remedy = (
                    "use data of as many classes, or set model.weights to fresh_head for a new head"
                    if prefix.startswith("readouts.")
                    else "set model.channels to match"
                )
                raise ValueError(
                    f"model.checkpoint {self.checkpoint} does not fit: {prefix}{key} is {given} there, "
                    f"{tuple(own.shape)} in the model; {remedy}"
                )
        module.load_state_dict(part)
        return module


def read_akamaster(path: Path, *, blocks_per_group: int) -> dict[str, Tensor]:
    """Read a checkpoint of akamaster/pytorch_resnet_cifar10, with its tensors named as in a chain."""
    if not path.is_file():
        raise ValueError(f"model.checkpoint {path} does not exist; give the path of a .th file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file that is no checkpoint
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"model.checkpoint {path} cannot be read ({reason}); give one saved by torch.save") from error
    weights = content.get("state_dict") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"model.checkpoint {path} holds no 'state_dict' of tensors; give one of {SOURCE}")
    unknown = next((key for key in weights if not _KNOWN_KEY.fullmatch(str(key))), None)
    if unknown is not None:
        raise ValueError(f"model.checkpoint {path} holds {unknown!r}, which this network lacks; give one of {SOURCE}")
    names = [key.removeprefix("module.") for key in weights]
    found = len({tuple(name.split(".")[:2]) for name in names if name.startswith("layer1.")})
    if found != blocks_per_group:
        raise ValueError(
            f"model.checkpoint {path} has {found} residual blocks per group, the model {blocks_per_group}; "
            f"set model.blocks_per_group to {found}"
        )
    return {_rename(name, blocks_per_group): value for name, value in zip(names, weights.values(), strict=True)}


SOURCE = "akamaster/pytorch_resnet_cifar10"
_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_KNOWN_KEY = re.compile(
    rf"(module\.)?(linear\.(weight|bias)|(layer[123]\.\d+\.)?(conv1\.weight|bn1\.{_NORM})"
    rf"|layer[123]\.\d+\.(conv2\.weight|bn2\.{_NORM}))"
)


def _rename(key: str, blocks_per_group: int) -> str:
    """`layer2.0.conv1.weight` -> `blocks.9.conv1.weight`; the stem and the first block share block 0."""
    top, _, rest = key.partition(".")
    if top == "linear":
        return f"readouts.{3 * blocks_per_group}.linear.{rest}"
    if top in ("conv1", "bn1"):
        return f"blocks.0.0.{key}"
    if not top.startswith("layer"):
        return key
    index, _, inner = rest.partition(".")
    block = (int(top.removeprefix("layer")) - 1) * blocks_per_group + int(index)
    return f"blocks.{block}.1.{inner}" if block == 0 else f"blocks.{block}.{inner}"


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight)
