"""A network as a chain of blocks x(t+1) = f_t(x(t)), with a readout at some of its boundaries."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from mpc_dist.precision import FULL, Precision
from mpc_dist.readout import Identity, Loss, check_loss, read_loss
from mpc_dist.validation import check_whole
from mpc_dist.windows import Windows


class Chain(nn.Module):
    """Ordered blocks, readouts by boundary, and the loss: what every MPC gradient is taken of.

    `readouts=None` reads the state itself at every boundary. No parameter may belong to two parts: each part has
    windows of its own, and the gradient of a parameter that lived in two would be undefined.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], loss: Loss, readouts: Mapping[int, nn.Module] | None = None
    ) -> None:
        super().__init__()
        if not blocks:
            raise ValueError("a chain needs at least 1 block, got none")
        if readouts is None:
            readouts = {boundary: Identity() for boundary in range(1, len(blocks) + 1)}
        for boundary in readouts:
            check_whole("readout boundary", boundary, minimum=1, maximum=len(blocks))
        self.blocks = nn.ModuleList(blocks)
        self.readouts = nn.ModuleDict({str(boundary): readouts[boundary] for boundary in sorted(readouts)})
        check_loss(loss)
        self.loss = loss
        self._check_nothing_shared()

    @property
    def num_blocks(self) -> int:
        """How many blocks there are (T)."""
        return len(self.blocks)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries that have a readout, ascending."""
        return tuple(int(key) for key in self.readouts)

    def predict(self, boundary: int, state: Tensor) -> Tensor:
        """What the readout at that boundary makes of the state."""
        prediction: Tensor = self.readouts[str(boundary)](state)
        return prediction

    def loss_at(self, boundary: int, state: Tensor, labels: Tensor, precision: Precision = FULL) -> Tensor:
        """L(x(s)): the loss read from the state at that boundary; some label must count.

        The readout computes in the precision; losses are never of less than float32.
        """
        with precision.scope(state.device):
            prediction = self.predict(boundary, state)
        return read_loss(self.loss, prediction, labels)

    def forward(self, inputs: Tensor) -> Tensor:
        """The prediction at the last boundary."""
        state = inputs
        for block in self.blocks:
            state = block(state)
        return self.predict(self.num_blocks, state)

    def _check_nothing_shared(self) -> None:
        owner: dict[int, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            part = ".".join(name.split(".")[:2])
            first = owner.setdefault(id(parameter), name)
            if not first.startswith(f"{part}."):
                raise ValueError(
                    f"{name} is the same parameter as {first}; blocks and readouts may not share weights: untie them, "
                    "or put what shares them into one block"
                )

    def check_windows(self, windows: Windows) -> None:
        """Raise unless the windows fit this chain: as many blocks, and a readout wherever one is aimed at."""
        if windows.num_blocks != self.num_blocks:
            raise ValueError(
                f"the windows cover {windows.num_blocks} blocks but the model has {self.num_blocks}; "
                f"build them with num_blocks={self.num_blocks}"
            )
        missing = sorted(set(windows.readouts) - set(self.boundaries))
        if missing:
            raise ValueError(
                f"the windows aim at boundaries {missing}, which have no readout; the model has them at "
                f"{list(self.boundaries)}: build it with readouts at windows.readouts"
            )
