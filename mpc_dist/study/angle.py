"""`mpc-dist reproduce angle`: the angle to back-propagation's gradient during training (paper, fig. 2)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.cell import Cell, Record
from mpc_dist.study.deep_linear import AllResidual
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict, VerdictWord
from mpc_dist.study.order import NOISE_FLOOR, order_near_end
from mpc_dist.study.paper_tasks import CIFAR, DENSE_DEPTH, LINEAR, MLP, PaperTask, resnet62, without_scaling

ALL_RESIDUAL = replace(
    LINEAR,
    title="linear net, all layers residual",
    model=AllResidual(DENSE_DEPTH),
    readout=ReadoutConfig("identity"),
)
CUBIC = 3.0
ORDER_TOLERANCE = 0.5
"""A fitted order within this of what a cubic law shows at the same depth counts as cubic."""
CLEAR_GROWTH = 5.0
"""Degrees by which the angle has to grow for a run to count."""


@dataclass(frozen=True)
class Size:
    """How long a task is watched."""

    task: PaperTask
    epochs: tuple[float, ...]
    """At whose ends the angle is measured; 0 is the start."""
    num_seeds: int
    steps_per_epoch: int | None = None
    """If other than a pass over the data."""

    def build_cells(self) -> dict[str, Cell]:
        """A run of back-propagation per seed."""
        per_epoch = self.steps_per_epoch or self.task.batches_per_epoch
        steps = tuple(round(epoch * per_epoch) for epoch in self.epochs)
        return {
            f"{self.task.title}, seed {seed}": self.task.train(
                steps=steps[-1],
                seed=seed,
                num_evaluations=max(1, round(self.epochs[-1])),
                angles_at=steps,
                test_batches=1,
            )
            for seed in range(self.num_seeds)
        }


FULL = (
    Size(LINEAR, (0, 0.2, 0.5, 1, 2, 4, 8), 3),
    Size(ALL_RESIDUAL, (0, 0.2, 0.5, 1, 2, 4, 8), 3),
    Size(MLP, (0, 0.1, 1, 5, 10, 20), 3),
    Size(resnet62(channels=4), (0, 0.1, 1, 2, 3), 2),
)
QUICK = (
    Size(LINEAR, (0, 0.2, 1, 2), 3),
    Size(ALL_RESIDUAL, (0, 0.2, 1, 2), 3),
    Size(MLP, (0, 0.1, 1), 3),
    Size(resnet62(channels=2), (0, 1, 2), 1, steps_per_epoch=10),
)


def build_cells(quick: bool) -> Mapping[str, Cell]:
    """Back-propagation on each task, and ten steps of the dense nets with Glorot's weights unscaled."""
    return build_from(QUICK if quick else FULL)


def build_from(sizes: Sequence[Size]) -> dict[str, Cell]:
    """Cells of these sizes."""
    cells: dict[str, Cell] = {}
    for size in sizes:
        cells |= size.build_cells()
    for task in map(without_scaling, (LINEAR, MLP)):
        for seed in range(3):
            cells[f"{task.title}, seed {seed}"] = task.train(steps=10, seed=seed, num_evaluations=10, test_batches=1)
    return cells


@dataclass(frozen=True)
class Watched:
    """One model's angles over training, a row per moment."""

    title: str
    epochs: tuple[float, ...]
    """Passes over the data."""
    gaps: NDArray[np.float64]
    """`gaps[seed, moment, h - 1]` = 1 - cos(theta_h)."""
    test: NDArray[np.float64]
    """`test[seed]`: the last test loss."""

    @property
    def num_blocks(self) -> int:
        """T."""
        return int(self.gaps.shape[2])

    def orders(self) -> NDArray[np.float64]:
        """`[seed, moment]`: the order in T - h near T."""
        return np.array([[order_near_end(row) for row in run] for run in self.gaps.tolist()])

    def mean_degrees(self) -> NDArray[np.float64]:
        """`[seed, moment]`: theta_h in degrees, averaged over h = 1..T-1."""
        cosines = np.clip(1 - self.gaps[:, :, :-1], -1, 1)
        return np.asarray(np.degrees(np.arccos(cosines)).mean(axis=2))


def gather(records: Records) -> list[Watched]:
    """The runs with angles, by model, in the order of the cells."""
    groups: dict[str, list[Record]] = {}
    for name, record in records.items():
        if record.cell["angles_at"]:
            groups.setdefault(name.rpartition(", seed")[0], []).append(record)
    return [_watch(title, runs) for title, runs in groups.items()]


def _watch(title: str, runs: Sequence[Record]) -> Watched:
    cell = runs[0].cell
    samples = cell["data"].get("num_train", 10_000)
    moments = [step for step in cell["angles_at"] if all(str(step) in run.result["angle_gaps"] for run in runs)]
    return Watched(
        title,
        tuple(step * cell["batch_size"] / samples for step in moments),
        np.array([[run.result["angle_gaps"][str(step)] for step in moments] for run in runs]),
        np.array([run.result["test"][-1] for run in runs]),
    )


def conclude(records: Records) -> Findings:
    """Orders per moment, growth of the angle, and what both say of the paper's claims."""
    watched = gather(records)
    growth, order, polynomial = _judge_growth(watched), _judge_order(watched), _judge_polynomial(watched)
    falls = [one.title for one in watched if _mean(one.orders()[:, -1]) < _mean(one.orders()[:, 0])]
    summary = (
        f"{_list(falls)}: the order in T - h falls while the net learns. " if falls else ""
    ) + f"The cubic order is {order.verdict}, the growth of the angle {growth.verdict}: {growth.evidence}."
    return Findings(
        summary,
        tables=(_order_table(watched), _divergence_table(records)),
        pictures=(Picture("angle", draw(watched), _caption(watched)),),
        verdicts=(growth, order, polynomial),
        notes=_notes(records),
    )


def _judge_growth(watched: Sequence[Watched]) -> Verdict:
    grown, total, words = 0, 0, []
    for one in watched:
        degrees = one.mean_degrees()
        grown += int(np.sum(degrees[:, -1] - degrees[:, 0] > CLEAR_GROWTH))
        total += len(degrees)
        words.append(f"{one.title} {_mean(degrees[:, 0]):.0f}° to {_mean(degrees[:, -1]):.0f}°")
    word: VerdictWord = "confirmed" if grown == total else "confirmed with limits" if grown > 0 else "not confirmed"
    return Verdict(
        "theta_h grows during training, so a small horizon serves early and not late (section 3, fig. 2)",
        word,
        f"theta_h, mean over h < T, grew by more than {CLEAR_GROWTH:g}° in {grown} of {total} runs: "
        + "; ".join(words),
    )


def _judge_order(watched: Sequence[Watched]) -> Verdict:
    starts = {one.title: one.orders()[:, 0] for one in watched}
    # What a cubic law shows at this depth: the sum of squares over the blocks that fall short of the end.
    cubes = {one.title: order_near_end(np.cumsum(np.arange(one.num_blocks) ** 2)[::-1].tolist()) for one in watched}
    cubic = [title for title, orders in starts.items() if abs(_mean(orders) - cubes[title]) <= ORDER_TOLERANCE]
    word: VerdictWord = (
        "confirmed" if len(cubic) == len(starts) else "confirmed with limits" if cubic else "not confirmed"
    )
    numbers = "; ".join(
        f"{one.title} {_mean(one.orders()[:, 0]):.2f} at the start, {_mean(one.orders()[:, -1]):.2f} at the end"
        for one in watched
    )
    return Verdict(
        "1 - cos(theta_h) vanishes like (T - h)^3 as h nears T, on trained nets as in the linear theory (fig. 2)",
        word,
        f"fitted order: {numbers}; {len(cubic)} of {len(starts)} models start within {ORDER_TOLERANCE} of what a cubic "
        f"law shows at their depth ({min(cubes.values()):.2f} to {max(cubes.values()):.2f})",
    )


def _judge_polynomial(watched: Sequence[Watched]) -> Verdict:
    """Whether the gap falls with h at all, everywhere: the weak form that horizon selection relies on."""
    rows = [(one.title, row[:-1]) for one in watched for run in one.gaps for row in run]
    rank = [float(np.corrcoef(np.arange(len(row)), np.argsort(np.argsort(-row)))[0, 1]) for _, row in rows]
    falling = sum(value > 0.9 for value in rank)
    word: VerdictWord = (
        "confirmed" if falling == len(rows) else "confirmed with limits" if falling > len(rows) / 2 else "not confirmed"
    )
    worst = rows[int(np.argmin(rank))][0]
    return Verdict(
        "A longer horizon has a gradient nearer to back-propagation's (section 3)",
        word,
        f"rank correlation of theta_h with T - h above 0.9 in {falling} of {len(rows)} profiles; "
        f"least {min(rank):.2f} ({worst})",
    )


def _order_table(watched: Sequence[Watched]) -> Table:
    rows = []
    for one in watched:
        orders, degrees = one.orders(), one.mean_degrees()
        for moment, epoch in enumerate(one.epochs):
            gaps = one.gaps[:, moment]
            rows.append(
                (
                    one.title,
                    f"{epoch:.3g}",
                    _spread(orders[:, moment]),
                    f"{_mean(degrees[:, moment]):.1f}",
                    *(f"{_mean(gaps[:, h - 1]):.3g}" for h in (1, one.num_blocks // 2, one.num_blocks - 1)),
                )
            )
    columns = ("model", "epoch", "order near T", "mean theta_h (degrees)", "1 - cos, h = 1", "h = T/2", "h = T - 1")
    return Table("Order of 1 - cos(theta_h) in T - h, mean over seeds (least to most)", columns, tuple(rows))


def _divergence_table(records: Records) -> Table:
    rows = []
    for name, record in records.items():
        if not record.cell["angles_at"]:
            first, last = record.result["test"][0], record.result["test"][-1]
            outcome = f"{last:.4g}" if math.isfinite(last) else f"no number by step {record.result['steps'][-1]}"
            rows.append((name, f"{record.cell['optimizer']['lr']:g}", f"{first:.4g}", outcome))
    columns = ("net", "learning rate", "loss at the start", "after 10 steps")
    return Table("Glorot's weights unscaled, at the paper's learning rates", columns, tuple(rows))


def draw(watched: Sequence[Watched]) -> Figure:
    """A panel per model: 1 - cos(theta_h) against T - h on log axes, a curve per moment."""
    figure = Figure(figsize=(10.5, 4.1 * math.ceil(len(watched) / 2)), layout="constrained")
    for place, one in enumerate(watched, start=1):
        axes = figure.add_subplot(math.ceil(len(watched) / 2), 2, place)
        ahead = np.arange(one.num_blocks - 1, 0, -1)
        means, orders = one.gaps.mean(axis=0)[:, :-1], one.orders().mean(axis=0)
        for moment, epoch in enumerate(one.epochs):
            shade = 0.15 + 0.7 * moment / max(1, len(one.epochs) - 1)
            colour = (shade, 0.35, 1 - shade)
            label = f"epoch {epoch:.2g}: order {orders[moment]:.2f}"
            axes.loglog(ahead, means[moment], "o-", ms=3.5, color=colour, label=label)
            for run in one.gaps[:, moment, :-1]:
                axes.loglog(ahead, run, lw=0.5, alpha=0.35, color=colour)
        cubic = means[0, -1] * ahead.astype(float) ** CUBIC
        axes.loglog(ahead[cubic < 2], cubic[cubic < 2], ":", color="gray", label="slope 3")
        ticks = [tick for tick in (1, 2, 3, 5, 10, 20) if tick < one.num_blocks]
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_title(f"{one.title} (T = {one.num_blocks})", fontsize=10)
        axes.set_xlabel("T - h   (0 is back-propagation)")
        axes.set_ylabel("1 - cos(theta_h)")
        axes.legend(fontsize=8, loc="lower right")
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _caption(watched: Sequence[Watched]) -> str:
    seeds = ", ".join(f"{one.title} {len(one.gaps)}" for one in watched)
    return (
        "1 - cos(theta_h) against T - h while back-propagation trains; thick: mean over seeds, thin: each seed. "
        f"Orders are fitted over the third of the horizons nearest T. Seeds: {seeds}."
    )


def _notes(records: Records) -> tuple[str, ...]:
    resnets = {
        f"ResNet-{6 * r.cell['model']['blocks_per_group'] + 2} has {r.cell['model']['channels']} channels (the paper's "
        f"16) and {r.cell['steps']} steps on 10,000 images of CIFAR-10 (the paper's 45,000 images, 40 epochs); "
        f"test loss {r.result['test'][-1]:.3g} at the end"
        for r in records.values()
        if r.cell["model"]["name"] == "resnet_cifar"
    }
    return (
        "Training is by back-propagation, SGD, rate x0.9 when an epoch's loss rose; rates 0.03, 0.01, 0.01 and batches "
        "100, 100, 32 as the paper's. Each angle is the mean over two batches of training data.",
        "The dense nets have 15 layers of width 10; the residual layers' Glorot weights are scaled by 1/T, as the "
        "theory's W = I + W~/T, because unscaled both nets blow up at these rates (table). The first and last layers "
        "of the first net are not residual; in the net of residual layers alone all are.",
        f"Gradients are float32, inner products float64; nothing below {NOISE_FLOOR:g} is fitted.",
        *sorted(resnets),
    )


def _mean(values: NDArray[np.float64]) -> float:
    return fmean(values.tolist())


def _spread(values: NDArray[np.float64]) -> str:
    return f"{_mean(values):.2f} ({values.min():.2f} to {values.max():.2f})"


def _list(words: Sequence[str]) -> str:
    text = ", ".join(words)
    return text[:1].upper() + text[1:]


EXPERIMENT = Experiment(
    "angle", "The angle to back-propagation during training (fig. 2)", build_cells, conclude, needs=(CIFAR,)
)
