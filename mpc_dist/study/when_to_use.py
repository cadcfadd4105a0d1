"""The experiment `when-to-use`: horizon training beside 1F1B, checkpointing and zero-bubble schedules, measured.

Quality is trained in one process, time on 8 stages simulated with what real ranks showed; its page is for engineers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpc_dist.data import DataSource, TextData
from mpc_dist.models import GPT, BlockModel, ResNetCifar
from mpc_dist.study.cell import Cell, Result
from mpc_dist.study.experiment import Experiment, Findings, Records
from mpc_dist.study.outcome import (
    TARGET_AT,
    Learnt,
    Panel,
    Step,
    adaptive_outcome,
    fixed_outcome,
    read_steps,
)
from mpc_dist.study.price_cell import CalibrationCell, PriceCell, calibrated_overhead, torch_ratio
from mpc_dist.study.small_images import SmallImages
from mpc_dist.study.stage_cells import COSINE, StagedWindows, TunedCell
from mpc_dist.study.when_to_use_page import write_findings
from mpc_dist.training.sections import OptimizerConfig

NUM_STAGES = 8
BACKPROP, ADAPTIVE, HORIZON_1 = "back-propagation", "adaptive", "h = 1"
METHODS: dict[str, StagedWindows | None] = {
    BACKPROP: StagedWindows("backprop"),
    HORIZON_1: StagedWindows("sliding", 1),
    "h = 2": StagedWindows("sliding", 2),
    "h = 3": StagedWindows("sliding", 3),
    "anchored 2": StagedWindows("anchored", 2, stride=2),
    "LoCo": StagedWindows("loco"),
    "tumbling 2": StagedWindows("tumbling", 2),
    "tumbling 4": StagedWindows("tumbling", 4),
    "cumulative 2": StagedWindows("cumulative", 2),
    ADAPTIVE: None,
}
"""Ways to learn, windows in stages; None: tumbling windows that grow."""
PLAIN, CHECKPOINTED, SPLIT, TORCH = "1F1B", "1F1B, checkpointing", "zero bubble, ours", "zero bubble, torch's"
SCHEDULES = {PLAIN: (False, False), CHECKPOINTED: (False, True), SPLIT: (True, False)}
"""Ways to run back-propagation: (backwards in halves, checkpointing)."""
CALIBRATION = "calibration"
TITLES = {"gpt": "GPT, 8 blocks, tiny Shakespeare", "resnet56": "ResNet-56, CIFAR-10 at 16 x 16 pixels"}
"""Of the problems' figures."""


@dataclass(frozen=True)
class Problem:
    """What is learnt, and how long."""

    name: str
    model: BlockModel
    data: DataSource
    optimizer: OptimizerConfig
    rates: tuple[float, ...]
    batch_size: int
    steps: int
    tuning_steps: int
    seeds: tuple[int, ...] = (0, 1, 2)
    test_batches: int = 1
    """Of 500 samples."""
    num_evaluations: int = 20
    adapt_every: int = 50
    microbatches: tuple[int, ...] = (1, 2, 4, 8, 16)

    def training(self, windows: StagedWindows | None) -> TunedCell:
        """Train with these windows."""
        return TunedCell(
            self.model,
            self.data,
            windows,
            self.optimizer,
            self.rates,
            self.batch_size,
            self.steps,
            self.tuning_steps,
            self.seeds,
            tuning_seed=max(self.seeds) + 100,
            num_stages=NUM_STAGES,
            num_evaluations=self.num_evaluations,
            test_batches=self.test_batches,
            adapt_every=self.adapt_every,
        )

    def pricing(self, windows: StagedWindows, *, split: bool, checkpoint: bool = False) -> PriceCell:
        """Price a step with these windows."""
        return PriceCell(
            self.model,
            self.data,
            windows,
            self.optimizer,
            self.batch_size,
            self.microbatches,
            split=split,
            checkpoint=checkpoint,
        )


SHAKESPEARE = TextData(path="data/tinyshakespeare.txt", unit="characters", context=48)
FULL_GPT = Problem(
    "gpt",
    GPT(num_blocks=8, width=48, num_heads=4),
    SHAKESPEARE,
    OptimizerConfig("adamw"),
    rates=(1e-3, 2e-3, 4e-3, 8e-3),
    batch_size=16,
    steps=1_000,
    tuning_steps=300,
)
FULL_RESNET = Problem(
    "resnet56",
    ResNetCifar(blocks_per_group=9, channels=8),
    SmallImages(num_train=10_000),
    OptimizerConfig("sgd", momentum=0.9, scheduler=COSINE),
    rates=(0.01, 0.03, 0.1),
    batch_size=32,
    steps=600,
    tuning_steps=150,
    test_batches=4,
    num_evaluations=12,
    adapt_every=50,
)
FULL_CALIBRATION = CalibrationCell(
    NUM_STAGES,
    (1, 4, 16),
    (("sliding:1", False), ("sliding:2", True), ("tumbling:2", True), ("backprop", False), ("backprop", True)),
    ("torch-InterleavedZeroBubble", "torch-ZBV"),
    seconds=0.01,
    repeats=1,
    repeat_seconds=1.0,
)


def list_problems(quick: bool) -> tuple[Problem, ...]:
    """What is learnt in the full and in the quick variant."""
    if not quick:
        return FULL_GPT, FULL_RESNET
    return (
        replace(
            FULL_GPT,
            model=GPT(num_blocks=8, width=32, num_heads=2),
            data=replace(SHAKESPEARE, context=32),
            rates=(1e-3, 4e-3),
            steps=60,
            tuning_steps=20,
            seeds=(0,),
            num_evaluations=5,
            adapt_every=15,
        ),
        replace(
            FULL_RESNET,
            model=ResNetCifar(blocks_per_group=9, channels=4),
            data=SmallImages(num_train=5_000, side=8),
            rates=(0.03, 0.1),
            steps=40,
            tuning_steps=12,
            seeds=(0,),
            test_batches=1,
            num_evaluations=4,
            adapt_every=10,
        ),
    )


def build_cells(problems: Sequence[Problem], calibration: CalibrationCell) -> dict[str, Cell]:
    """Calibration; and of every problem, each way to learn and what a step of it costs."""
    cells: dict[str, Cell] = {CALIBRATION: calibration}
    for problem in problems:
        for method, windows in METHODS.items():
            cells[f"{problem.name}/learns/{method}"] = problem.training(windows)
        backprop = METHODS[BACKPROP]
        assert backprop is not None
        for schedule, (split, checkpoint) in SCHEDULES.items():
            cells[f"{problem.name}/costs/{schedule}"] = problem.pricing(backprop, split=split, checkpoint=checkpoint)
        for method, windows in METHODS.items():
            if windows is not None and method != BACKPROP:
                # Windows of one stage have no adjoint that another rank waits for: halves gain nothing.
                cells[f"{problem.name}/costs/{method}"] = problem.pricing(windows, split=method != HORIZON_1)
    return cells


def build_variant(quick: bool) -> Mapping[str, Cell]:
    """The cells of the full or the quick variant."""
    few = replace(
        FULL_CALIBRATION,
        microbatches=(1, 8),
        windows=(("sliding:1", False), ("backprop", True)),
        repeat_seconds=0.4,
    )
    return build_cells(list_problems(quick), few if quick else FULL_CALIBRATION)


def compare(records: Records, problem: str, overhead: float, calibration: Result) -> Panel:
    """Every system on one problem, from the records."""

    def learns(method: str) -> Result:
        return records[f"{problem}/learns/{method}"].result

    def costs(system: str) -> dict[int, Step]:
        record = records[f"{problem}/costs/{system}"]
        return read_steps(record.result, overhead=overhead, unit=record.cell["stage_seconds"])

    backprop = Learnt.of(learns(BACKPROP))
    target = backprop.loss_at(TARGET_AT)
    outcomes = [
        fixed_outcome(name, backprop, steps, target=target, is_backprop=True)
        for name, steps in {
            **{name: costs(name) for name in SCHEDULES},
            TORCH: _torch_steps(costs(SPLIT), calibration),
        }.items()
        if steps
    ]
    for method, windows in METHODS.items():
        if windows is not None and method != BACKPROP:
            learnt = Learnt.of(learns(method))
            outcomes.append(fixed_outcome(method, learnt, costs(method), target=target, is_backprop=False))
    sizes = {1: HORIZON_1, 2: "tumbling 2", 4: "tumbling 4", NUM_STAGES: SPLIT}
    adaptive = records[f"{problem}/learns/{ADAPTIVE}"]
    outcomes.append(
        adaptive_outcome(
            ADAPTIVE,
            adaptive.result,
            {size: costs(name) for size, name in sizes.items()},
            every=adaptive.cell["adapt_every"],
            target=target,
        )
    )
    plain = records[f"{problem}/costs/{PLAIN}"]
    return Panel(
        problem,
        TITLES.get(problem, problem),
        target,
        tuple(outcomes),
        cell=records[f"{problem}/learns/{BACKPROP}"].cell,
        price=plain.cell,
        readout_share=plain.result["readout_share"],
    )


def _torch_steps(split: dict[int, Step], calibration: Result) -> dict[int, Step]:
    """Our split back-propagation's time, as many times as long as torch's took on real ranks; bytes are ours."""
    ratios = {m: torch_ratio(calibration, m) for m in split}
    return {m: replace(step, time=step.time * ratio) for m, step in split.items() if (ratio := ratios[m]) is not None}


def conclude(records: Records) -> Findings:
    """Who wins where, from the records."""
    calibration = records[CALIBRATION]
    overhead = calibrated_overhead(calibration.result)
    names = dict.fromkeys(name.split("/")[0] for name in records if name != CALIBRATION)
    panels = [compare(records, name, overhead, calibration.result) for name in names]
    return write_findings(panels, calibration, overhead)


WHEN_TO_USE = Experiment(
    name="when-to-use",
    title="When to use horizon training instead of 1F1B",
    build_cells=build_variant,
    conclude=conclude,
    needs=("data/tinyshakespeare.txt", "data/cifar-10-batches-py"),
    page_beside=True,
)
