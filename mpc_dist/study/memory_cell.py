"""A cell that counts what training with some windows holds in memory."""

from dataclasses import dataclass, field

from mpc_dist.data import Batches, DataSource
from mpc_dist.models import BlockModel, build_chain
from mpc_dist.profile.memory import peak_bytes
from mpc_dist.profile.unchanged import unchanged
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.cell import Result
from mpc_dist.study.training_cell import WindowChoice


@dataclass(frozen=True)
class HeldMemoryCell:
    """Bytes that the eager sweep holds for backward, by windows, beside those of weights and of their gradients."""

    model: BlockModel
    data: DataSource
    batch_size: int
    choices: tuple[WindowChoice, ...]
    readout: ReadoutConfig = field(default_factory=ReadoutConfig)

    def run(self) -> Result:
        """`held` by the windows' words; `weights` of all blocks and of the last head, `gradients` of what trains."""
        data = self.data.load()
        inputs, labels = next(Batches(data.train, batch_size=self.batch_size, seed=0))
        chain = build_chain(self.model, data.task, readout=self.readout.kind)
        with unchanged(chain):
            held = {
                str(choice): peak_bytes(chain, inputs, labels, choice.build(self.model.num_blocks))
                for choice in self.choices
            }
        own = [*chain.blocks.parameters(), *chain.readouts[str(chain.num_blocks)].parameters()]
        return {
            "held": held,
            "weights": sum(parameter.nbytes for parameter in own),
            "gradients": sum(parameter.nbytes for parameter in own if parameter.requires_grad),
            "num_blocks": chain.num_blocks,
        }
