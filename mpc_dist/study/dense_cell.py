"""A cell that trains copies of a fully connected chain side by side, one per window map.

Its curves are those of a `TrainingCell` per window map, to the rounding of the sums.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mpc_dist.data import Batches, DataSource
from mpc_dist.models import BlockModel, Chain, build_chain
from mpc_dist.models.residual_mlp import DenseBlock
from mpc_dist.readout import ReadoutKind
from mpc_dist.study.cell import Result
from mpc_dist.study.dense_batch import DenseBatch
from mpc_dist.study.training_cell import WindowChoice, keep_digits
from mpc_dist.training.optimizer import DropOnRise
from mpc_dist.training.sections import DROP_ON_RISE, OptimizerConfig


@dataclass(frozen=True)
class DenseCell:
    """Train one copy per window map, for whole epochs."""

    model: BlockModel
    """res_linear or res_mlp."""
    data: DataSource
    windows: tuple[WindowChoice, ...]
    optimizer: OptimizerConfig
    """Plain sgd; with drop_on_rise every copy has a rate of its own."""
    batch_size: int
    epochs: int
    seed: int
    """Of initial weights and the order of the data."""
    readout: ReadoutKind
    branch_scale: float = 1.0
    """The factor c of the residual blocks x + c * f(x); 1/T is the paper's W = I + W~/T."""
    learns_scaled: bool = True
    """Whether the factor stays a part of the model; False: it scales the initial weights, then there is none."""

    def __post_init__(self) -> None:
        plain = self.optimizer.name == "sgd" and not self.optimizer.momentum and not self.optimizer.weight_decay
        if not plain or self.optimizer.scheduler not in (None, DROP_ON_RISE):
            raise ValueError(f"copies side by side take plain sgd, with drop_on_rise or without; got {self.optimizer}")

    def run(self) -> Result:
        """By copy and epoch: mean training loss of the epoch, and test loss before the first and after each."""
        data = self.data.load()
        chain = build_chain(self.model, data.task, readout=self.readout, seed=self.seed)
        scale_branches(chain, self.branch_scale)
        copies = DenseBatch(chain, [choice.build(self.model.num_blocks) for choice in self.windows])
        batches = Batches(data.train, batch_size=self.batch_size, seed=self.seed)
        tests = next(Batches(data.test, batch_size=data.test.num_samples, seed=0, shuffle=False))
        factors = copies.rate_factors(self.branch_scale**2 if self.learns_scaled else 1.0)
        rates = torch.full((len(self.windows), 1), self.optimizer.lr)
        train: list[Tensor] = []
        test = [copies.losses(*tests)]
        for _ in range(self.epochs):
            losses = []
            for _ in range(batches.batches_per_epoch):
                gradients, loss = copies.gradients(*next(batches))
                copies.parameters.addcmul_(gradients, rates * factors, value=-1)
                losses.append(loss)
            train.append(torch.stack(losses).mean(0))
            test.append(copies.losses(*tests))
            if self.optimizer.scheduler == DROP_ON_RISE and len(train) > 1:
                rates = torch.where((train[-1] > train[-2]).unsqueeze(1), rates * DropOnRise.FACTOR, rates)
        return {
            "windows": [str(choice) for choice in self.windows],
            "train": _by_copy(train),
            "test": _by_copy(test),
            "rate": [keep_digits(value) for value in rates.flatten().tolist()],
        }


def scale_branches(chain: Chain, scale: float) -> None:
    """Multiply the weights of residual dense blocks, whose biases are 0 yet.

    x + c * relu(W x + b) is x + relu(c W x + c b): a model with the factor is one without, whose weights are c times
    as large and learn c^2 times as fast.
    """
    with torch.no_grad():
        for block in chain.blocks:
            if isinstance(block, DenseBlock) and block.residual:
                block.linear.weight.mul_(scale)


def _by_copy(losses: list[Tensor]) -> list[list[float | None]]:
    """JSON has no word for what is not finite: None."""
    rows = torch.stack(losses, dim=1).tolist()
    return [[keep_digits(value) if math.isfinite(value) else None for value in row] for row in rows]
