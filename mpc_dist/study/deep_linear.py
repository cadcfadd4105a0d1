"""Deep linear nets W(t) = I + W~(t)/T, every layer residual: what the paper's theory is about."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mpc_dist.models import Chain
from mpc_dist.models.residual_mlp import DenseBlock
from mpc_dist.profile import measure_angles
from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import keep_digits
from mpc_dist.task import Task
from mpc_dist.validation import check_whole

Relation = Literal["one for all", "smooth", "independent"]
"""How the W~(t) of neighbouring layers are related."""
RELATIONS: tuple[Relation, ...] = ("one for all", "smooth", "independent")


@dataclass(frozen=True)
class AllResidual:
    """A linear net whose every layer, the first and the last too, is x + W x; states are as wide as the data."""

    num_blocks: int = 15
    """Layers, each a block (T)."""
    name: Literal["all_residual"] = "all_residual"

    def __post_init__(self) -> None:
        check_whole("model.num_blocks", self.num_blocks, minimum=1)

    def check_task(self, task: Task) -> None:
        """Accept maps of a space to itself."""
        if task.input_shape != (task.num_outputs,):
            raise ValueError(
                f"a net of residual layers maps a space to itself, but the data is {task.input_shape} to "
                f"{task.num_outputs}; use data 'linear'"
            )

    def width_at(self, boundary: int, task: Task) -> int:  # noqa: ARG002
        """The data's."""
        return task.num_outputs

    def build_block(self, index: int, task: Task) -> nn.Module:  # noqa: ARG002
        """Glorot's weights over T."""
        block = DenseBlock(task.num_outputs, task.num_outputs, residual=True, relu=False, bias=False)
        block.linear.weight.data.div_(self.num_blocks)
        return block

    def build_head(self, boundary: int, task: Task) -> nn.Module:  # noqa: ARG002
        """The state is the prediction."""
        return Identity()


@dataclass(frozen=True)
class DeepLinearCell:
    """1 - cos(theta_h) of every horizon of such a net at initialisation, in float64."""

    num_blocks: int
    relation: Relation
    norm: float
    """Spectral norm of every W~(t)."""
    width: int
    seed: int

    def run(self) -> Result:
        """On whitened data (the inputs are an orthonormal basis) with a Gaussian target."""
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randn(self.width, self.width, generator=generator, dtype=torch.float64)
        blocks = []
        for perturbation in self.draw(generator):
            block = nn.Linear(self.width, self.width, bias=False, dtype=torch.float64)
            block.weight.data.copy_(torch.eye(self.width) + perturbation / self.num_blocks)
            blocks.append(block)
        inputs = torch.eye(self.width, dtype=torch.float64)
        profile = measure_angles(Chain(blocks, mean_squared_error), [(inputs, target)])
        return {"angle_gaps": [keep_digits(1 - value) for value in profile.horizon_cosines()]}

    def draw(self, generator: torch.Generator) -> Tensor:
        """W~(0)..W~(T-1), all of the same spectral norm."""
        count = {"one for all": 1, "smooth": 2, "independent": self.num_blocks}[self.relation]
        drawn = torch.randn(count, self.width, self.width, generator=generator, dtype=torch.float64)
        if self.relation == "smooth":
            # A quarter turn from one matrix to another: as T grows, neighbours grow alike.
            turn = torch.linspace(0, torch.pi / 2, self.num_blocks, dtype=torch.float64)[:, None, None]
            drawn = torch.cos(turn) * drawn[0] + torch.sin(turn) * drawn[1]
        norms: Tensor = torch.linalg.matrix_norm(drawn, 2)
        drawn = self.norm * drawn / norms[:, None, None]
        return drawn.expand(self.num_blocks, -1, -1)
