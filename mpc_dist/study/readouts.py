"""Which readout makes small horizons train best, counting what the heads cost."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from mpc_dist.data import Batches, DataSource, DigitsData, TrigonometricData
from mpc_dist.models import GPT, BlockModel, ResMLP, ResNetCifar, build_chain
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.cell import Cell, Record, Result
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Table, Verdict, VerdictWord
from mpc_dist.study.training_cell import TrainingCell
from mpc_dist.study.tuned_cell import TunedCell
from mpc_dist.study.window_settings import ADAMW, LOCAL, SGD, TEXT, TUMBLING2, Scale
from mpc_dist.study.window_verdicts import Outcome, read_outcome
from mpc_dist.training.sections import OptimizerConfig

FULL = Scale(gpt_steps=200, mlp_steps=400, resnet_steps=160, seeds=(0, 1, 2), num_rates=3, num_evaluations=6)
QUICK = Scale(gpt_steps=10, mlp_steps=20, resnet_steps=8, seeds=(0, 1), num_rates=1, num_evaluations=2)
DEFAULT = "local"
"""What `ReadoutConfig()` is: the head that the model itself ends in."""
SHAPES = {
    DEFAULT: ReadoutConfig("local"),
    "local, norm": ReadoutConfig("local", norm=True),
    "local, no norm": ReadoutConfig("local", norm=False),
    "local, hidden layer": ReadoutConfig("local", depth=2),
    "local, norm and hidden layer": ReadoutConfig("local", norm=True, depth=2),
    "shared": ReadoutConfig("shared"),
    "pool": ReadoutConfig("pool"),
    "project": ReadoutConfig("project"),
}
HAS_NORM = "GPT"
"""The family whose own head has a norm, so that 'local, norm' is the default there; with the others 'no norm' is."""


@dataclass(frozen=True)
class ReadoutCell:
    """One readout in one setting: what it reaches, and what it costs."""

    tuned: TunedCell

    def run(self) -> Result:
        """As the tuned cell gives, with the cost of the interior readouts."""
        return {**self.tuned.run(), "cost": count_cost(self.tuned.training)}


def count_cost(cell: TrainingCell) -> dict[str, int]:
    """Parameters and multiply-adds (times 2) of one sample's step: blocks with the last head, and interior readouts.

    A backward pass costs a forward for the state's gradient and another for the weights', which fixed readouts save.
    """
    data = cell.data.load()
    chain = build_chain(cell.model, data.task, readout=cell.readout)
    inputs, _ = next(Batches(data.train, batch_size=1, seed=0))
    interior = [s for s in cell.windows.build(cell.model.num_blocks).readouts if s < chain.num_blocks]
    flops = {"blocks": 0, "readouts": 0}
    parameters = {"blocks": 0, "readouts": 0}
    chain.eval()
    state = inputs
    with torch.no_grad():
        for boundary, block in enumerate(chain.blocks, start=1):
            flops["blocks"] += 3 * _count(lambda block=block, state=state: block(state))  # type: ignore[misc]
            parameters["blocks"] += _weights(block)
            state = block(state)
            if boundary not in (*interior, chain.num_blocks):
                continue
            part = "readouts" if boundary in interior else "blocks"
            readout = chain.readouts[str(boundary)]
            passes = 3 if _weights(readout) else 2
            flops[part] += passes * _count(lambda readout=readout, state=state: readout(state))  # type: ignore[misc]
            parameters[part] += _weights(readout)
    return {
        f"{part} {what}": n for what, of in (("flops", flops), ("parameters", parameters)) for part, n in of.items()
    }


def _count(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def build_cells(scale: Scale) -> Mapping[str, Cell]:
    """As `family, windows: readout`."""
    slow, fast = (1e-2, 3e-2, 1e-1), (1e-3, 3e-3, 1e-2)
    gpt = GPT(num_blocks=8, width=scale.gpt_width, num_heads=2)
    families: dict[str, tuple[BlockModel, DataSource, OptimizerConfig, tuple[float, ...], int, int]] = {
        HAS_NORM: (gpt, scale.text, ADAMW, (1e-3, 3e-3, 8e-3), 8, scale.gpt_steps),
        "ResNet": (ResNetCifar(blocks_per_group=3, channels=4), DigitsData(), SGD, slow, 32, scale.resnet_steps),
        "residual MLP": (
            ResMLP(num_blocks=8, width=32),
            TrigonometricData(num_train=20_000),
            ADAMW,
            fast,
            100,
            scale.mlp_steps,
        ),
    }
    cells: dict[str, Cell] = {}
    for family, (model, data, optimizer, rates, batch_size, steps) in families.items():
        same = {"local, norm", "local, norm and hidden layer"} if family == HAS_NORM else {"local, no norm", "shared"}
        for windows in (LOCAL, TUMBLING2):
            for name in [one for one in SHAPES if one not in same]:
                training = TrainingCell(
                    model=model,
                    data=data,
                    windows=windows,
                    optimizer=optimizer,
                    batch_size=batch_size,
                    steps=steps,
                    seed=0,
                    readout=SHAPES[name],
                    num_evaluations=scale.num_evaluations,
                    test_batches=1,
                )
                chosen = rates if scale.num_rates == 3 else rates[1:2]
                cells[f"{family}, {windows}: {name}"] = ReadoutCell(TunedCell(training, chosen, scale.seeds))
    return cells


@dataclass(frozen=True)
class Choice:
    """What a readout reached and cost in one setting."""

    outcome: Outcome
    share: float
    """Interior readouts' share of a step's operations."""
    parameters: int
    """Of the interior readouts."""
    at_equal_compute: float
    """Test loss when as many operations were spent as the cheapest readout spends in all its steps."""


def conclude(records: Records) -> Findings:
    """Tables, a figure, and which readout should be the default."""
    grouped: dict[str, dict[str, Record]] = {}
    for name, record in records.items():
        setting, _, readout = name.partition(": ")
        grouped.setdefault(setting, {})[readout] = record
    choices = {setting: _compare(of) for setting, of in grouped.items()}
    verdicts = (judge_default(choices), judge_small_heads(choices), judge_shared(choices))
    best = rank_readouts(choices)
    first = next(iter(best))
    sizes = {
        name.partition(", ")[0]: record.cell["tuned"]["training"] for name, record in grouped_first(grouped).items()
    }
    seeds = next(iter(records.values())).cell["tuned"]["seeds"]
    rows = tuple(
        (
            setting,
            name,
            str(c.outcome),
            f"{c.at_equal_compute:.3g}",
            f"{c.outcome.rate:g}",
            str(c.parameters),
            f"{c.share:.0%}",
        )
        for setting, of in choices.items()
        for name, c in of.items()
    )
    caption = (
        f"Test loss with each readout, divided by that of the default (local, as the model's own head), at equal "
        f"operations; mean of {len(seeds)} seeds."
    )
    return Findings(
        summary=(
            f"By the mean ratio of its loss to the default's at equal operations, over the settings in which it can be "
            f"used, the best readout that all models can use is '{first}' ({best[first]:.3f}); in order: "
            + ", ".join(f"{name} {value:.3f}" for name, value in best.items())
            + "."
        ),
        tables=(
            Table(
                "Readouts",
                (
                    "setting",
                    "readout",
                    "test loss",
                    "at equal operations",
                    "rate",
                    "head parameters",
                    "share of operations",
                ),
                rows,
            ),
        ),
        pictures=(Picture("readouts", draw_readouts(choices), caption),),
        verdicts=verdicts,
        notes=(
            f"Seeds {', '.join(map(str, seeds))}; the rate is the best of those tried after half the steps on "
            "another seed.",
            "; ".join(
                f"{f}: {c['steps']} steps of {c['batch_size']} samples, {c['optimizer']['name']}"
                for f, c in sizes.items()
            )
            + ".",
            "Operations are those of matrix products and convolutions, forward and backward; fixed readouts save the "
            "weights' gradient. The shared head's message to every reading rank is not counted.",
            "A hidden layer is as wide as the state. GPT's own head has a layer norm, the others' have none.",
        ),
    )


def grouped_first(grouped: Mapping[str, Mapping[str, Record]]) -> dict[str, Record]:
    """One record of each setting."""
    return {setting: next(iter(of.values())) for setting, of in grouped.items()}


def _compare(of: Mapping[str, Record]) -> dict[str, Choice]:
    costs = {name: record.result["cost"] for name, record in of.items()}
    totals = {name: cost["blocks flops"] + cost["readouts flops"] for name, cost in costs.items()}
    cheapest = min(totals.values())
    found = {}
    for name, record in of.items():
        curves = [(run["steps"], run["test"]) for run in record.result["runs"]]
        steps = record.cell["tuned"]["training"]["steps"] * cheapest / totals[name]
        equal = statistics.fmean(float(np.interp(steps, *curve)) for curve in curves)
        outcome = read_outcome(replace(record, cell=record.cell["tuned"]))
        share = costs[name]["readouts flops"] / totals[name]
        found[name] = Choice(outcome, share, costs[name]["readouts parameters"], equal)
    return found


def rank_readouts(choices: Mapping[str, Mapping[str, Choice]]) -> dict[str, float]:
    """Mean ratio to the default's loss at equal operations, best first, of the readouts that every setting has."""
    ratios: dict[str, list[float]] = {}
    for of in choices.values():
        # 'norm' and 'no norm' are each the default of some family.
        names = {name: name for name in of}
        has_norm = "local, no norm" in of
        names |= {"local, norm": DEFAULT, "local, norm and hidden layer": "local, hidden layer"} if has_norm else {}
        names |= {} if has_norm else {"local, no norm": DEFAULT}
        for name, meant in names.items():
            ratios.setdefault(name, []).append(of[meant].at_equal_compute / of[DEFAULT].at_equal_compute)
    everywhere = {name: statistics.fmean(of) for name, of in ratios.items() if len(of) == len(choices)}
    return dict(sorted(everywhere.items(), key=lambda item: item[1]))


def judge_default(choices: Mapping[str, Mapping[str, Choice]]) -> Verdict:
    """Whether the default should stay."""
    best = rank_readouts(choices)
    first = next(iter(best))
    lost = best[DEFAULT] - best[first]
    word: VerdictWord = "confirmed" if lost < 0.01 else "confirmed with limits" if lost < 0.05 else "not confirmed"
    return Verdict(
        "A linear local head as the model's own is the best default",
        word,
        f"best is {first}: {best[first]:.3f} of the default's loss at equal operations, over {len(choices)} settings",
    )


def judge_small_heads(choices: Mapping[str, Mapping[str, Choice]]) -> Verdict:
    """Whether a hidden layer earns its cost."""
    better, rows = 0, []
    for setting, of in choices.items():
        deep, plain = of["local, hidden layer"], of[DEFAULT]
        better += deep.at_equal_compute < plain.at_equal_compute * 0.99
        rows.append(f"{setting}: {deep.at_equal_compute:.3g} against {plain.at_equal_compute:.3g}")
    count = len(choices)
    word: VerdictWord = "confirmed" if better >= 0.9 * count else "confirmed with limits" if better else "not confirmed"
    return Verdict("A hidden layer in the local head trains better at equal operations", word, "; ".join(rows))


def judge_shared(choices: Mapping[str, Mapping[str, Choice]]) -> Verdict:
    """Whether trained heads beat the final head's weights, where both can be used."""
    pairs = {setting: (of["shared"].outcome, of[DEFAULT].outcome) for setting, of in choices.items() if "shared" in of}
    worse = sum(plain.is_better_than(shared) for shared, plain in pairs.values())
    better = sum(shared.is_better_than(plain) for shared, plain in pairs.values())
    word: VerdictWord = "not confirmed" if better < worse or not better else "confirmed"
    if better and worse < better < len(pairs):
        word = "confirmed with limits"
    evidence = "; ".join(f"{setting}: shared {a}, local {b}" for setting, (a, b) in pairs.items())
    return Verdict("The shared head trains better than local heads (GPT, equal steps)", word, evidence)


def draw_readouts(choices: Mapping[str, Mapping[str, Choice]]) -> Figure:
    """Loss relative to the default's, a row per setting."""
    figure = Figure(figsize=(9, 1.8 + 0.5 * len(choices)), layout="constrained")
    axes = figure.subplots()
    markers = dict(zip(SHAPES, "osDv^P*X", strict=True))
    for name, marker in markers.items():
        points = [
            (of[name].at_equal_compute / of[DEFAULT].at_equal_compute, row)
            for row, of in enumerate(choices.values())
            if name in of and math.isfinite(of[name].at_equal_compute)
        ]
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, marker=marker, s=55, label=name, zorder=3, alpha=0.85)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(choices)), list(choices))
    axes.invert_yaxis()
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [v for v in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if low <= v <= high]
    axes.set_xticks(ticks, [f"{v:g}" for v in ticks])
    axes.minorticks_off()
    axes.set_xlabel("test loss / that of the default, at equal operations")
    axes.legend(ncols=4, fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


READOUTS = Experiment(
    name="readouts",
    title="Which readout makes small horizons train best",
    build_cells=lambda quick: build_cells(QUICK if quick else FULL),
    conclude=conclude,
    needs=(str(TEXT.path),),
)
