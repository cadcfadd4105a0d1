"""What the windows experiment trains: models, data, optimizers and windows, with the sizes of its variants."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpc_dist.data import DataSource, DigitsData, TextData, TrigonometricData
from mpc_dist.models import GPT, BlockModel, ResMLP, ResNetCifar
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.cell import Cell
from mpc_dist.study.chain_modes import ModesCell
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.study.tuned_cell import TunedCell
from mpc_dist.training.sections import OptimizerConfig

BACKPROP = WindowChoice("backprop")
LOCAL = WindowChoice("sliding", 1)
SLIDING2, SLIDING4 = WindowChoice("sliding", 2), WindowChoice("sliding", 4)
TUMBLING2, TUMBLING4 = WindowChoice("tumbling", 2), WindowChoice("tumbling", 4)
CUMULATIVE2 = WindowChoice("cumulative", 2)
COMMON = (BACKPROP, LOCAL, SLIDING2, SLIDING4, TUMBLING2, TUMBLING4, CUMULATIVE2)
NEAR = tuple(WindowChoice("near", 2, near_weight=weight) for weight in (0.1, 0.3, 1.0))
COARSE = WindowChoice("sliding", 2, unit=2)
DECAY = "with decay"
"""Ends the name of a setting in which weights decay."""
MAIN = "GPT, 8 blocks, adamw, local heads"
DEEP = "GPT, 16 blocks, adamw, local heads"
SGD, ADAMW = OptimizerConfig("sgd", momentum=0.9), OptimizerConfig("adamw")
TEXT = TextData(path="data/tinyshakespeare.txt", unit="characters", context=32, max_bytes=300_000, test_fraction=0.03)
ANGLES_OF = (BACKPROP, LOCAL, SLIDING2, TUMBLING2)
"""Trainings with these windows measure angles."""
DECAYED = OptimizerConfig("adamw", weight_decay=1.0)


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    gpt_steps: int
    mlp_steps: int
    resnet_steps: int
    seeds: tuple[int, ...]
    num_rates: int
    """Of three: all, or the middle one alone."""
    num_evaluations: int
    gpt_width: int = 32
    num_draws: int = 5
    """Of kernels, in the linear model."""
    text: TextData = TEXT
    main_steps: int | None = None
    """Of the setting on which the cause is sought; None: as of the other GPTs."""


FULL = Scale(
    main_steps=480, gpt_steps=180, mlp_steps=400, resnet_steps=160, seeds=(0, 1, 2), num_rates=3, num_evaluations=4
)
QUICK = Scale(gpt_steps=10, mlp_steps=20, resnet_steps=8, seeds=(0, 1), num_rates=1, num_evaluations=2, num_draws=2)


@dataclass(frozen=True)
class Setting:
    """One model, task, optimizer and readout, and the windows that are compared on it."""

    model: BlockModel
    data: DataSource
    optimizer: OptimizerConfig
    readout: ReadoutConfig
    rates: tuple[float, float, float]
    batch_size: int
    steps: int
    windows: tuple[WindowChoice, ...]

    @property
    def name(self) -> str:
        """As tables and figures call it."""
        family = {"gpt": "GPT", "res_mlp": "residual MLP", "resnet_cifar": "ResNet"}[self.model.name]  # type: ignore[attr-defined]
        heads = {"local": "local heads", "shared": "shared head", "pool": "pooled"}[self.readout.kind]
        decay = f" {DECAY}" if self.optimizer.weight_decay else ""
        return f"{family}, {self.model.num_blocks} blocks, {self.optimizer.name}{decay}, {heads}"


def build_settings(scale: Scale) -> list[Setting]:
    """All that is trained."""
    local, pooled, shared = ReadoutConfig("local"), ReadoutConfig("pool"), ReadoutConfig("shared")
    gpt = GPT(num_blocks=8, width=scale.gpt_width, num_heads=2)
    mlp, resnet = ResMLP(num_blocks=8, width=32), ResNetCifar(blocks_per_group=3, channels=4)
    waves, digits = TrigonometricData(num_train=20_000), DigitsData()
    fast, slow = (1e-3, 3e-3, 1e-2), (1e-2, 3e-2, 1e-1)
    few = (BACKPROP, LOCAL, SLIDING2, SLIDING4, TUMBLING2)

    def text(model: GPT, optimizer: OptimizerConfig, readout: ReadoutConfig, *windows: WindowChoice) -> Setting:
        rates = (0.05, 0.2, 0.8) if optimizer.name == "sgd" else (1e-3, 3e-3, 8e-3)
        return Setting(model, scale.text, optimizer, readout, rates, 8, scale.gpt_steps, windows)

    deep = replace(gpt, num_blocks=16)
    settings = [
        replace(text(gpt, ADAMW, local, *COMMON, *NEAR, COARSE), steps=scale.main_steps or scale.gpt_steps),
        text(gpt, ADAMW, shared, BACKPROP, LOCAL, SLIDING2, TUMBLING2),
        text(gpt, SGD, local, *few),
        text(gpt, DECAYED, local, LOCAL, SLIDING2),
        text(deep, ADAMW, local, BACKPROP, LOCAL, SLIDING2, TUMBLING2, COARSE),
    ]
    for optimizer, rates in ((SGD, slow), (ADAMW, fast)):
        settings += [
            Setting(mlp, waves, optimizer, readout, rates, 100, scale.mlp_steps, COMMON) for readout in (pooled, local)
        ]
        settings.append(Setting(resnet, digits, optimizer, local, rates, 32, scale.resnet_steps, few))
    # So deep, unscaled initial weights diverge.
    deep_mlp, deep_resnet = replace(mlp, num_blocks=16, init_scale=1 / 16), replace(resnet, blocks_per_group=5)
    settings += [
        Setting(deep_mlp, waves, SGD, pooled, slow, 100, scale.mlp_steps, few),
        Setting(deep_mlp, waves, ADAMW, local, fast, 100, scale.mlp_steps, few),
        Setting(deep_resnet, digits, SGD, local, slow, 32, scale.resnet_steps, few[1:]),
    ]
    return settings


def build_cells(scale: Scale) -> Mapping[str, Cell]:
    """Trainings as `setting: windows`, and modes of the linear model as `modes of 8: windows`."""
    cells: dict[str, Cell] = {}
    for setting in build_settings(scale):
        for windows in setting.windows:
            training = TrainingCell(
                model=setting.model,
                data=setting.data,
                windows=windows,
                optimizer=setting.optimizer,
                batch_size=setting.batch_size,
                steps=setting.steps,
                seed=0,
                readout=setting.readout,
                num_evaluations=scale.num_evaluations,
                test_batches=1,
                angles_at=(0, setting.steps) if setting.name == MAIN and windows in ANGLES_OF else (),
                watches_interior=True,
            )
            rates = setting.rates if scale.num_rates == 3 else setting.rates[1:2]
            cells[f"{setting.name}: {windows}"] = TunedCell(training, rates, scale.seeds)
    for depth in (8, 16):
        more = [WindowChoice("sliding", size) for size in (3, 6)] + [WindowChoice("cumulative", 4)]
        more.append(WindowChoice("sliding", 2, unit=4))
        for windows in (*COMMON, *NEAR, COARSE, *more):
            cells[f"modes of {depth}: {windows}"] = ModesCell(windows, depth, scale.num_draws)
    return cells
