"""The protocol of a model family, and how a chain is built from it.

Every block and head is initialised from its own seed, so a part's weights do not depend on which other parts are built.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from mpc_dist.models.chain import Chain
from mpc_dist.readout import LOSSES, Identity, ReadoutConfig, ReadoutKind, Shared, pool, project, shape_head
from mpc_dist.task import Task


class BlockModel(Protocol):
    """A model family with its sizes: ordered blocks, and what can read a state at a boundary.

    The task gives the loss. Implementations are frozen dataclasses and serve as their own configuration.
    """

    @property
    def num_blocks(self) -> int:
        """How many blocks the model has (T)."""

    def check_task(self, task: Task) -> None:
        """Raise unless the model can be built for this task."""

    def width_at(self, boundary: int, task: Task) -> int:
        """How many features the state x(boundary) has."""

    def build_block(self, index: int, task: Task) -> nn.Module:
        """Block `index`; block 0 takes raw inputs."""

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """A trained head that reads x(boundary); at the last boundary, the model's own."""


@dataclass(frozen=True)
class Parts:
    """Builds any single part of a model, with the weights that it has in the whole."""

    model: BlockModel
    task: Task
    readouts: ReadoutConfig
    seed: int

    def block(self, index: int) -> nn.Module:
        """Block `index`."""
        return _seeded(partial(self.model.build_block, index, self.task), self.seed, f"block {index}")

    def head(self) -> nn.Module:
        """The model's own head, which reads the last boundary."""
        last = self.model.num_blocks
        return _seeded(partial(self.model.build_head, last, self.task), self.seed, f"head {last}")

    def readout(self, boundary: int) -> nn.Module:
        """The readout at a boundary."""
        needs_head = self.readouts.kind == "shared" or boundary == self.model.num_blocks
        head = self.head() if needs_head else None
        return build_readout(self.model, self.task, self.readouts, boundary, head=head, seed=self.seed)


def build_parts(
    model: BlockModel, task: Task, *, readout: ReadoutConfig | ReadoutKind = "local", seed: int = 0
) -> Parts:
    """What builds a model's parts one by one, for a rank that owns only some of them."""
    model.check_task(task)
    return Parts(model, task, readout if isinstance(readout, ReadoutConfig) else ReadoutConfig(readout), seed)


def build_chain(
    model: BlockModel,
    task: Task,
    *,
    readout: ReadoutConfig | ReadoutKind = "local",
    boundaries: Iterable[int] | None = None,
    seed: int = 0,
) -> Chain:
    """Build the blocks and the readouts at `boundaries` (default: all; the last one is always there)."""
    parts = build_parts(model, task, readout=readout, seed=seed)
    last = model.num_blocks
    wanted = sorted({*(range(1, last + 1) if boundaries is None else boundaries), last})
    blocks = [parts.block(t) for t in range(last)]
    head = parts.head()
    readouts = {s: build_readout(model, task, parts.readouts, s, head=head, seed=seed) for s in wanted}
    return Chain(blocks, LOSSES[task.kind], readouts)


def build_readout(
    model: BlockModel, task: Task, config: ReadoutConfig, boundary: int, *, head: nn.Module | None, seed: int
) -> nn.Module:
    """The configured readout at a boundary; the last boundary's is the model's own `head`, whatever is configured.

    The head may be left out where it is not needed: it can be large.
    """
    if boundary == model.num_blocks:
        assert head is not None
        return head
    kind = config.kind
    width, last_width = model.width_at(boundary, task), model.width_at(model.num_blocks, task)
    if kind == "identity" and width != task.num_outputs:
        raise ValueError(
            f"an identity readout at boundary {boundary} gives {width} features, but the task has {task.num_outputs} "
            "outputs; use pool, project or local"
        )
    if kind == "shared" and width != last_width:
        raise ValueError(
            f"a shared readout at boundary {boundary} has {width} features, but the final head reads {last_width}; "
            "use local or pool, or anchors only where the widths agree"
        )

    def build_local() -> nn.Module:
        return shape_head(model.build_head(boundary, task), norm=config.norm, depth=config.depth)

    readouts: dict[ReadoutKind, Callable[[], nn.Module]] = {
        "identity": Identity,
        "pool": lambda: pool(width, task.num_outputs),
        "project": lambda: project(width, task.num_outputs, seed=_part_seed(seed, f"project {boundary}")),
        "local": lambda: _seeded(build_local, seed, f"head {boundary}"),
        "shared": lambda: Shared(_given(head)),
    }
    return readouts[kind]()


def _given(head: nn.Module | None) -> nn.Module:
    assert head is not None, "a shared readout needs the final head"
    return head


def _part_seed(seed: int, part: str) -> int:
    return zlib.crc32(f"{seed} {part}".encode())


def _seeded(build: Callable[[], nn.Module], seed: int, part: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_part_seed(seed, part))
        return build()
