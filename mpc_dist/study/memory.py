"""`mpc-dist reproduce memory`: M(h) of five models, its line, and what bends it (paper, memory figure)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from mpc_dist.models import BlockModel, HuggingFace, ResLinear, ResMLP, ResNetCifar, build_chain
from mpc_dist.profile import LineFit, fit_line, measure_memory
from mpc_dist.profile.blocks import measure_blocks, without_allocating
from mpc_dist.readout import ReadoutKind
from mpc_dist.report.angles import byte_unit, format_bytes
from mpc_dist.study.cell import Cell, Record, Result
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict, VerdictWord
from mpc_dist.task import Task
from mpc_dist.windows import sliding

STRAIGHT = 0.99
"""R^2 from which M(h) counts as a line."""
EXPLAINED = 0.01
"""Largest relative miss for the block sizes to explain M(h)."""
PHOTOS = Task("classification", (3, 224, 224), 1000)
UNTIMED = 1e12
"""Operations per second, to count bytes without a clock; no time is kept."""


@dataclass(frozen=True)
class MemoryCell:
    """M(h) by the eager sweep, and bytes per block, with tensors that have shapes but no memory."""

    model: BlockModel
    task: Task
    readout: ReadoutKind
    batch_size: int
    horizons: tuple[int, ...]

    def run(self) -> Result:
        """Bytes only: nothing is allocated, and nothing computed."""
        with without_allocating():
            chain = build_chain(self.model, self.task, readout=self.readout)
            inputs = torch.zeros((self.batch_size, *self.task.input_shape))
            is_regression = self.task.kind == "regression"
            shape = (self.batch_size, self.task.num_outputs) if is_regression else (self.batch_size,)
            labels = torch.zeros(shape, dtype=torch.get_default_dtype() if is_regression else torch.int64)
            costs = measure_blocks(
                chain, inputs, labels, lambda parameters: torch.optim.SGD(parameters, lr=0.0), flops_per_second=UNTIMED
            )
            held = measure_memory(chain, inputs, labels, horizons=self.horizons)
        return {
            "held": {str(h): size for h, size in held.items()},
            "blocks": [int(block.saved_bytes) for block in costs.blocks],
            "shared": [int(block.shared_input_bytes) for block in costs.blocks],
            "readouts": [int(readout.saved_bytes) for readout in costs.readouts],
            "states": [int(block.output_bytes) for block in costs.blocks],
        }


@dataclass(frozen=True)
class BlockBytes:
    """What each block and readout holds for backward."""

    blocks: Sequence[int]
    """Without what the block below holds already."""
    shared: Sequence[int]
    """Of its input, that the block below holds too."""
    readouts: Sequence[int]

    def window(self, readout: int, horizon: int) -> int:
        """The graph of one readout: the blocks that its adjoint crosses, and the reading itself."""
        first = sliding(len(self.blocks), horizon).stop_of(readout)
        return self.shared[first] + sum(self.blocks[first:readout]) + self.readouts[readout - 1]

    def eager(self, horizon: int) -> int:
        """One window at a time: the largest."""
        return max(self.window(readout, horizon) for readout in sliding(len(self.blocks), horizon).readouts)

    def static(self, horizon: int) -> int:
        """Every window at once, each with a graph of its own, as a graph that is laid out before it runs holds them.

        With equal blocks of a bytes that is a h (T - h + 1): T - h + 1 windows of h blocks.
        """
        return sum(self.window(readout, horizon) for readout in sliding(len(self.blocks), horizon).readouts)


@dataclass(frozen=True)
class Size:
    """A model at the size at which it is measured."""

    title: str
    model: BlockModel
    task: Task
    readout: ReadoutKind
    batch_size: int
    most_horizons: int | None = None
    """Spread over 1..T; None: all."""

    def build_cell(self) -> MemoryCell:
        """The cell."""
        every, most = self.model.num_blocks, self.most_horizons or self.model.num_blocks
        horizons = sorted({round(1 + (every - 1) * i / max(1, most - 1)) for i in range(most)})
        return MemoryCell(self.model, self.task, self.readout, self.batch_size, tuple(horizons))


def build_sizes(quick: bool) -> tuple[Size, ...]:
    """The three models of the paper's main experiments, and the two of its fine-tuning."""
    fewer = 6 if quick else None
    return (
        Size("linear residual net", ResLinear(), Task("regression", (10,), 10), "identity", 100, fewer),
        Size("residual MLP", ResMLP(), Task("regression", (1,), 4), "pool", 100, fewer),
        Size("ResNet-62", ResNetCifar(), Task("classification", (3, 32, 32), 10), "pool", 32, 6 if quick else 16),
        Size("ResNet-50", _hugging_face("resnet"), PHOTOS, "local", 32, fewer),
        Size("ViT-B/16", _hugging_face("vit"), PHOTOS, "local", 32, fewer),
    )


def _hugging_face(architecture: str) -> HuggingFace:
    """transformers' default sizes, which are ResNet-50's and ViT-B/16's."""
    return HuggingFace(architecture=architecture, overrides={"num_labels": PHOTOS.num_outputs})


def build_cells(quick: bool) -> Mapping[str, Cell]:
    """A cell per model."""
    return {size.title: size.build_cell() for size in build_sizes(quick)}


@dataclass(frozen=True)
class Measured:
    """One model's memory."""

    title: str
    held: dict[int, int]
    """M(h) by horizon."""
    bytes: BlockBytes
    cell: dict[str, Any]

    @classmethod
    def of(cls, title: str, record: Record) -> "Measured":
        """From its record."""
        result = record.result
        parts = BlockBytes(result["blocks"], result["shared"], result["readouts"])
        return cls(title, {int(h): size for h, size in result["held"].items()}, parts, record.cell)

    @property
    def num_blocks(self) -> int:
        """T."""
        return len(self.bytes.blocks)

    @property
    def fit(self) -> LineFit:
        """The line through M(h)."""
        return fit_line(self.held)

    @property
    def inequality(self) -> float:
        """The largest block's bytes over the smallest's, the ends of the chain left out."""
        inner = self.bytes.blocks[1:-1] or self.bytes.blocks
        return max(inner) / max(1, min(inner))

    @property
    def miss(self) -> float:
        """How far M(h) is from the largest window of block bytes, at worst, as a share."""
        return max(abs(self.bytes.eager(h) - size) / size for h, size in self.held.items())


def conclude(records: Records) -> Findings:
    """Lines, the static variant, and the models that bend."""
    measured = [Measured.of(title, record) for title, record in records.items()]
    bent = [one for one in measured if one.fit.r_squared < STRAIGHT]
    names = " and ".join(one.title for one in bent)
    summary = (
        f"M(h) of {names} is no line (R² below {STRAIGHT}): their blocks hold unequal bytes, and the largest run of h "
        "blocks, which is all that M(h) is, grows ever more slowly."
        if bent
        else "M(h) is a line for every model measured."
    )
    return Findings(
        summary,
        tables=(_line_table(measured), _block_table(measured)),
        pictures=(
            Picture("memory", draw_memory(measured), _caption(measured)),
            Picture("blocks", draw_blocks(measured), "Bytes that each block holds for backward, by its place."),
        ),
        verdicts=(_judge_lines(measured), _judge_exception(measured), _judge_static(measured)),
        notes=(
            "Bytes are those that autograd saves for backward, each storage once, while the eager sweep runs; weights, "
            "their gradients, optimizer state and the batch are left out. float32 throughout, full widths.",
            "Counted with tensors that have shapes but no memory, as CPU kernels save them; a test compares such a "
            "count with a real one.",
            "The stem is part of block 0, and the head of the last readout. ResNet-50 and ViT-B/16 have transformers' "
            "default sizes, 1,000 classes, images of 224 x 224 and trained heads at every boundary.",
            "Static: every readout's window has a graph of its own and all are held at once; computed from the bytes "
            "per block.",
        ),
    )


def _judge_lines(measured: Sequence[Measured]) -> Verdict:
    straight = [one for one in measured if one.fit.r_squared >= STRAIGHT]
    word: VerdictWord = (
        "confirmed" if len(straight) == len(measured) else "confirmed with limits" if straight else "not confirmed"
    )
    return Verdict(
        "Memory is affine in the horizon, M(h) = a h + b (section 3, memory figure)",
        word,
        "R²: " + "; ".join(f"{one.title} {one.fit.r_squared:.4f}" for one in measured),
    )


def _judge_exception(measured: Sequence[Measured]) -> Verdict:
    claim = "ResNet-50 is the exception to the line, because its blocks hold unequal bytes (memory figure)"
    chosen = [one for one in measured if one.title == "ResNet-50"]
    if not chosen:
        return Verdict(claim, "not confirmed", "ResNet-50 was not measured")
    (one,) = chosen
    others = [other for other in measured if other is not one and other.fit.r_squared < STRAIGHT]
    is_bent, is_explained = one.fit.r_squared < STRAIGHT, one.miss <= EXPLAINED
    word: VerdictWord = "not confirmed"
    if is_bent and is_explained:
        word = "confirmed with limits" if others else "confirmed"
    share = sum(one.bytes.blocks[:3]) / sum(one.bytes.blocks)
    evidence = (
        f"R² {one.fit.r_squared:.4f}; blocks from {format_bytes(max(one.bytes.blocks))} (the first, with the stem) "
        f"down to {format_bytes(min(one.bytes.blocks))}; the first three of {one.num_blocks} hold {share:.0%}; the "
        f"largest run of h blocks gives M(h) within {one.miss:.2%}"
    )
    if others:
        evidence += "; not the only one: " + ", ".join(
            f"{other.title} R² {other.fit.r_squared:.4f}, inner blocks unequal by {other.inequality:.3g}"
            for other in others
        )
    return Verdict(claim, word, evidence)


def _judge_static(measured: Sequence[Measured]) -> Verdict:
    ratios, peaks = [], []
    for one in measured:
        static = {h: one.bytes.static(h) for h in range(1, one.num_blocks + 1)}
        peak = max(static, key=static.__getitem__)
        ratios.append(static[peak] / static[one.num_blocks])
        peaks.append(f"{one.title} {ratios[-1]:.3g} times back-propagation's at h = {peak} of {one.num_blocks}")
    worse = sum(ratio > 1 for ratio in ratios)
    word: VerdictWord = "confirmed" if worse == len(ratios) else "confirmed with limits" if worse else "not confirmed"
    return Verdict(
        "Held as a static graph, memory is O(h (T - h + 1)), more than back-propagation's in the middle (appendix)",
        word,
        "largest: " + "; ".join(peaks),
    )


def _line_table(measured: Sequence[Measured]) -> Table:
    rows = []
    for one in measured:
        fit, last = one.fit, one.num_blocks
        middle = math.ceil(last / 2)
        rows.append(
            (
                one.title,
                str(last),
                str(one.cell["batch_size"]),
                format_bytes(fit.slope),
                format_bytes(fit.intercept),
                f"{fit.r_squared:.4f}",
                format_bytes(one.held[1]),
                format_bytes(one.held[last]),
                f"{one.inequality:.3g}",
                f"{one.miss:.2%}",
                f"{one.bytes.static(middle) / one.bytes.static(last):.3g}",
            )
        )
    columns = (
        "model",
        "T",
        "batch",
        "a",
        "b",
        "R²",
        "M(1)",
        "M(T)",
        "largest / smallest inner block",
        "miss of the largest run",
        "static at T/2, of back-propagation's",
    )
    return Table("M(h) = a h + b", columns, tuple(rows))


def _block_table(measured: Sequence[Measured]) -> Table:
    rows = tuple(
        (one.title, ", ".join(f"{size / byte_unit(max(one.bytes.blocks))[1]:.3g}" for size in one.bytes.blocks), unit)
        for one in measured
        for unit in [byte_unit(max(one.bytes.blocks))[0]]
    )
    return Table(
        "Bytes that each block holds for backward, in the order of the chain", ("model", "blocks", "unit"), rows
    )


def draw_memory(measured: Sequence[Measured]) -> Figure:
    """A panel per model: M(h), its line, and the static variant, as shares of back-propagation's."""
    columns = 3
    lines = math.ceil(len(measured) / columns)
    figure = Figure(figsize=(11, 3.5 * lines), layout="constrained")
    for place, one in enumerate(measured, start=1):
        axes = figure.add_subplot(lines, columns, place)
        every = np.arange(1, one.num_blocks + 1)
        whole = one.held[one.num_blocks]
        static = np.array([one.bytes.static(int(h)) for h in every]) / one.bytes.static(one.num_blocks)
        axes.plot(every, static, "--", color="tab:red", lw=1.2, label="static graph")
        axes.plot(list(one.held), np.array(list(one.held.values())) / whole, "o", ms=4, label="eager, measured")
        axes.plot(every, (one.fit.slope * every + one.fit.intercept) / whole, color="gray", lw=1, label="line")
        axes.set_title(f"{one.title}, R² = {one.fit.r_squared:.4f}", fontsize=10)
        axes.set_ylim(0, float(max(1.1, 1.05 * static.max())))
        axes.set_xlabel("horizon h (blocks)")
        axes.set_ylabel("memory / back-propagation's")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            axes.legend(fontsize=8)
    return figure


def draw_blocks(measured: Sequence[Measured]) -> Figure:
    """Bytes per block as a share of the largest, by place in the chain."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for one in measured:
        places = (np.arange(one.num_blocks) + 0.5) / one.num_blocks
        axes.plot(places, np.array(one.bytes.blocks) / max(one.bytes.blocks), "o-", ms=3.5, lw=1.2, label=one.title)
    axes.set_xlabel("place in the chain (0 is the input)")
    axes.set_ylabel("bytes held, share of the largest block")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _caption(measured: Sequence[Measured]) -> str:
    sizes = ", ".join(f"{one.title} T = {one.num_blocks}, batch {one.cell['batch_size']}" for one in measured)
    return f"Memory held for backward against the horizon, as a share of back-propagation's; full widths: {sizes}."


EXPERIMENT = Experiment("memory", "Memory against the horizon", build_cells, conclude)
