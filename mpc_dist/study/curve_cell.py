"""A cell that measures what Algorithm 1 sees before training: memory and angle of every horizon."""

from dataclasses import dataclass
from itertools import islice

import torch

from mpc_dist.data import Batches, DataSource
from mpc_dist.models import BlockModel, Chain, build_chain
from mpc_dist.models.residual_mlp import DenseBlock
from mpc_dist.profile import AngleProfile, measure_angles, measure_memory
from mpc_dist.profile.memory import peak_bytes
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.readout import ReadoutKind
from mpc_dist.study.cell import Result
from mpc_dist.study.dense_cell import scale_branches
from mpc_dist.study.training_cell import WindowChoice, keep_digits


@dataclass(frozen=True)
class CurveCell:
    """A model as it is initialised."""

    model: BlockModel
    data: DataSource
    readout: ReadoutKind
    batch_size: int
    num_batches: int
    seed: int
    others: tuple[WindowChoice, ...] = ()
    """Windows besides the horizons, of which memory is measured."""
    branch_scale: float = 1.0
    """The factor of residual dense blocks, as in `DenseCell`."""
    learns_scaled: bool = False

    def run(self) -> Result:
        """Bytes and cosine by horizon 1..T, bytes by other windows, and the loss at the last boundary."""
        data = self.data.load()
        chain = build_chain(self.model, data.task, readout=self.readout, seed=self.seed)
        scale_branches(chain, self.branch_scale)
        batches = Batches(data.train, batch_size=self.batch_size, seed=self.seed)
        samples = list(islice(batches, self.num_batches))
        profile = measure_angles(chain, samples)
        if self.learns_scaled:
            profile = scale_profile(profile, chain, self.branch_scale)
        memory = measure_memory(chain, *samples[0], horizons=range(1, chain.num_blocks + 1))
        with unchanged(chain):
            others = {
                str(choice): peak_bytes(chain, *samples[0], choice.build(chain.num_blocks)) for choice in self.others
            }
            with torch.no_grad():
                losses = [float(chain.loss(chain(inputs), labels)) for inputs, labels in samples]
        return {
            "memory": list(memory.values()),
            "cosines": [keep_digits(value, 9) for value in profile.horizon_cosines()],
            "other_memory": others,
            "loss": keep_digits(sum(losses) / len(losses)),
        }


def scale_profile(profile: AngleProfile, chain: Chain, scale: float) -> AngleProfile:
    """The profile of a chain whose residual blocks are x + scale * f(x): their gradients have that factor too."""
    factors = [scale**2 if isinstance(block, DenseBlock) and block.residual else 1.0 for block in chain.blocks]
    return AngleProfile(
        tuple(tuple(factor * gram for factor, gram in zip(factors, batch, strict=True)) for batch in profile.grams)
    )
