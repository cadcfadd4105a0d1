"""What is known of a model's blocks and readouts, per micro-batch: the planner's raw material, kept as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpc_dist.document import read_json, write_whole
from mpc_dist.plain_value import build
from mpc_dist.schedule import Costs, Layout
from mpc_dist.validation import check_real, check_whole

MESSAGES_HELD, MESSAGES_HELD_ON_GPU = 2, 1
"""Buffers for messages to come that a rank holds on each channel: gloo posts receives ahead, NCCL must not."""


@dataclass(frozen=True)
class BlockCosts:
    """One block, for one micro-batch."""

    forward: float
    """Seconds."""
    input_grad: float
    """Seconds of the input gradient alone; 0 for the first block, whose input needs none."""
    weight_grad: float
    """Seconds that a full backward takes beyond the input gradient."""
    saved_bytes: float
    """Held for backward, without what the block below holds already."""
    shared_input_bytes: float
    """Of its input, that the block below holds too: held once more if the two are on different ranks."""
    output_bytes: float
    """Of the state that it gives."""
    parameter_bytes: float
    """Of trained weights."""
    fixed_bytes: float = 0.0
    """Of weights and buffers that are not trained, and of autocast's copies of those that are."""
    optimizer_bytes: float = 0.0
    """Of the optimizer's state."""
    message_share: float = 1.0
    """Of the state's bytes, those that travel to the next stage: fewer if it travels in a narrower type."""

    @property
    def message_bytes(self) -> float:
        """The message to the next stage."""
        return self.output_bytes * self.message_share


@dataclass(frozen=True)
class ReadoutCosts:
    """What reading a loss at one boundary costs, for one micro-batch."""

    seconds: float
    """Prediction, loss and their gradients."""
    saved_bytes: float
    """Held while the loss is read, and freed then."""
    parameter_bytes: float
    """Of a trained head."""
    fixed_bytes: float = 0.0
    """Of weights and buffers that are not trained, and of autocast's copies of those that are."""
    optimizer_bytes: float = 0.0
    """Of the optimizer's state."""


@dataclass(frozen=True)
class Measurements:
    """A model at one micro-batch size."""

    samples: int
    """Per micro-batch."""
    blocks: tuple[BlockCosts, ...]
    readouts: tuple[ReadoutCosts, ...]
    """`readouts[s - 1]`: at boundary s."""
    update_seconds_per_byte: float
    """Of the optimizer's step, per byte of trained weights."""
    source: str
    """How times and bytes were found."""
    gradient_multiple: float = 1.0
    """Bytes of a gradient per byte of its weight: 2 for weights of two bytes."""
    messages_held: int = MESSAGES_HELD
    """Buffers for messages to come on each channel of a rank."""

    def __post_init__(self) -> None:
        check_whole("samples per micro-batch:", self.samples, minimum=1)
        if not self.blocks or len(self.readouts) != len(self.blocks):
            raise ValueError(
                f"the profile has {len(self.blocks)} blocks and {len(self.readouts)} readouts; measure at least one "
                "block, and a readout at every boundary"
            )
        for kind, parts in (("block", self.blocks), ("readout", self.readouts)):
            for index, part in enumerate(parts):
                for name, value in asdict(part).items():  # type: ignore[call-overload]
                    check_real(f"{name} of {kind} {index} in the profile", value, minimum=0)

    @property
    def num_blocks(self) -> int:
        """How many blocks the model has (T)."""
        return len(self.blocks)

    def lasting_bytes(self, part: BlockCosts | ReadoutCosts) -> float:
        """Held whatever is in flight: weights, gradients and optimizer state."""
        return part.parameter_bytes * (1.0 + self.gradient_multiple) + part.optimizer_bytes + part.fixed_bytes

    def weight_bytes(self, blocks: Sequence[int], boundaries: Sequence[int]) -> float:
        """Weights, gradients and optimizer state of these blocks and readouts."""
        parts: list[BlockCosts | ReadoutCosts] = [
            *(self.blocks[t] for t in blocks),
            *(self.readouts[s - 1] for s in boundaries),
        ]
        return sum(self.lasting_bytes(part) for part in parts)

    def segment_costs(
        self, layout: Layout, *, checkpoint: bool = False, latency: float = 0.0, bandwidth: float = math.inf
    ) -> Costs:
        """What the simulator needs to price a schedule of this layout.

        With activation checkpointing a block keeps its input and runs again before its backward.
        """
        forward, input_grad, weight_grad, held, read, message = [], [], [], [], [], []
        for segment, blocks in enumerate(layout.blocks):
            own = [self.blocks[t] for t in blocks]
            readout = self.readouts[blocks.stop - 1] if segment + 1 in layout.windows.readouts else None
            again = sum(block.forward for block in own) if checkpoint else 0.0
            forward.append(sum(block.forward for block in own) + (readout.seconds if readout else 0.0))
            input_grad.append(sum(block.input_grad for block in own) + again)
            weight_grad.append(sum(block.weight_grad for block in own))
            message.append(own[-1].message_bytes)
            read.append(readout.saved_bytes if readout else 0.0)
            begins_rank = segment == layout.segments[layout.ranks[segment]].start
            if checkpoint:
                held.append(sum(self.blocks[t - 1].output_bytes for t in blocks if t))
                read[-1] = max(read[-1], max(block.saved_bytes for block in own))
            else:
                held.append(sum(b.saved_bytes for b in own) + (own[0].shared_input_bytes if begins_rank else 0.0))
        return Costs(
            tuple(forward),
            tuple(input_grad),
            tuple(weight_grad),
            latency=latency,
            bandwidth=bandwidth,
            message_bytes=tuple(message),
            held_bytes=tuple(held),
            passing_bytes=tuple(read),
            update=max(self.update_seconds(layout.stage_blocks(rank)) for rank in range(layout.num_ranks)),
        )

    def sweep_bytes(self, horizon: int) -> float:
        """What the eager sweep with the paper's windows holds at most: M(h) without weights.

        At every boundary the last h blocks are held, and the readout on top.
        """
        peaks = []
        for boundary in range(1, self.num_blocks + 1):
            held = self.blocks[max(0, boundary - horizon) : boundary]
            # The block below the first of them is gone, so what the two share is that one's own now.
            own = held[0].shared_input_bytes + sum(block.saved_bytes for block in held)
            peaks.append(own + self.readouts[boundary - 1].saved_bytes)
        return max(peaks)

    def cut_into(self, num_parts: int) -> "Measurements":
        """What a part of the micro-batch costs, where all is in proportion to it: counted, not timed."""
        part = 1 / num_parts
        blocks = [
            replace(
                b,
                forward=b.forward * part,
                input_grad=b.input_grad * part,
                weight_grad=b.weight_grad * part,
                saved_bytes=b.saved_bytes * part,
                shared_input_bytes=b.shared_input_bytes * part,
                output_bytes=b.output_bytes * part,
            )
            for b in self.blocks
        ]
        readouts = [replace(r, seconds=r.seconds * part, saved_bytes=r.saved_bytes * part) for r in self.readouts]
        return replace(self, samples=self.samples // num_parts, blocks=tuple(blocks), readouts=tuple(readouts))

    def update_seconds(self, blocks: Sequence[int]) -> float:
        """The optimizer's step on these blocks."""
        return self.update_seconds_per_byte * sum(self.blocks[t].parameter_bytes for t in blocks)


def slowest(found: tuple[Measurements, ...]) -> Measurements:
    """Of several processes that measured the same at once, the one that took longest."""
    return max(found, key=lambda one: sum(b.forward + b.input_grad + b.weight_grad for b in one.blocks))


def save_measurements(path: Path, found: dict[int, Measurements], key: dict[str, Any]) -> None:
    """Write what was measured, by number of micro-batches, with what it depends on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": key, "measurements": {str(m): asdict(one) for m, one in found.items()}}
    write_whole(path, json.dumps(content, indent=1) + "\n")


def load_measurements(path: Path, key: dict[str, Any]) -> dict[int, Measurements] | None:
    """What was measured for exactly this key; None if there is no such file, or it is of another key."""
    if not path.exists():
        return None
    try:
        kept = build(_Kept, read_json(path))
        if kept.key != json.loads(json.dumps(key)):
            return None
        return {int(m): one for m, one in kept.measurements.items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no profile of mpc_dist ({error}); delete it") from error


@dataclass(frozen=True)
class _Kept:
    """What a file holds."""

    key: dict[str, Any]
    measurements: dict[str, Measurements]
