"""The paper's two fully connected nets: layers of one width, residual on all but the first and the last."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.readout import Identity, LinearHead
from mpc_dist.task import Task
from mpc_dist.validation import MAX_WIDTH, check_real, check_whole
from mpc_dist.windows import MAX_BLOCKS


class DenseBlock(nn.Module):
    """y = [x +] [relu](W x [+ b])."""

    def __init__(self, in_features: int, out_features: int, *, residual: bool, relu: bool, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        # Glorot weights and zero biases, as in the paper's experiments.
        nn.init.xavier_uniform_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)
        self.residual = residual
        self.relu = relu

    def forward(self, state: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        out: Tensor = self.linear(state)
        if self.relu:
            out = F.relu(out)
        return state + out if self.residual else out


@dataclass(frozen=True)
class _DenseChain:
    num_blocks: int = 15
    """Number of layers, each a block (the paper's T)."""
    width: int = 10
    """Features of every interior state."""
    init_scale: float = 1.0
    """What Glorot's initial weights of the residual layers are multiplied by; 1/T is the theory's W = I + W~/T."""

    nonlinear: ClassVar[bool]
    """Whether layers have a bias, and all but the last a ReLU."""

    def __post_init__(self) -> None:
        check_whole("model.num_blocks", self.num_blocks, minimum=1, maximum=MAX_BLOCKS)
        check_whole("model.width", self.width, minimum=1, maximum=MAX_WIDTH)
        check_real("model.init_scale", self.init_scale, minimum=0)

    def check_task(self, task: Task) -> None:
        """Accept tasks on vectors or images (flattened); tokens have no features to multiply."""
        if task.kind == "tokens":
            raise ValueError("a fully connected net takes real vectors, but the data gives tokens; use model 'gpt'")

    def width_at(self, boundary: int, task: Task) -> int:
        """The width, or the label's dimension after the last block."""
        return task.num_outputs if boundary == self.num_blocks else self.width

    def build_block(self, index: int, task: Task) -> nn.Module:
        """Layer `index`; the first flattens its input, the last gives the label's dimension without a ReLU."""
        first, last = index == 0, index == self.num_blocks - 1
        layer = DenseBlock(
            math.prod(task.input_shape) if first else self.width,
            task.num_outputs if last else self.width,
            residual=not (first or last),
            relu=self.nonlinear and not last,
            bias=self.nonlinear,
        )
        if layer.residual:
            layer.linear.weight.data.mul_(self.init_scale)
        return nn.Sequential(nn.Flatten(), layer) if first and len(task.input_shape) > 1 else layer

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """A linear map; none at the last boundary, where the last block has made the prediction."""
        return Identity() if boundary == self.num_blocks else LinearHead(self.width, task.num_outputs)


@dataclass(frozen=True)
class ResLinear(_DenseChain):
    """Deep linear residual net: no activation, no bias."""

    name: Literal["res_linear"] = "res_linear"
    """Model family."""

    nonlinear: ClassVar[bool] = False


@dataclass(frozen=True)
class ResMLP(_DenseChain):
    """Residual multi-layer perceptron: ReLU and bias."""

    name: Literal["res_mlp"] = "res_mlp"
    """Model family."""

    nonlinear: ClassVar[bool] = True
