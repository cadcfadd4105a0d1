"""`reproduce finetune`: tuning trained models across horizons, test accuracy and memory (the paper's fig. 3 and 4).

A ResNet-56 of CIFAR-10 is tuned as a whole, a ViT that is trained here first is tuned through LoRA; both on CIFAR-100.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

from mpc_dist.data import Cifar10Data, Cifar100Data, DataSource
from mpc_dist.models import BlockModel, ResNetCifar
from mpc_dist.models.hugging_face import LoraConfig
from mpc_dist.readout import ReadoutConfig, ReadoutKind
from mpc_dist.study.cell import Cell
from mpc_dist.study.experiment import Experiment
from mpc_dist.study.finetune_findings import PRETRAINING, conclude
from mpc_dist.study.finetune_part import HEAD_ALONE
from mpc_dist.study.memory_cell import HeldMemoryCell
from mpc_dist.study.pretraining import HeadOnly, PretrainedViT, Pretraining
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.training.sections import OptimizerConfig

CHECKPOINT = "data/resnet56-4bfd9763.th"
NUM_CLASSES = 20
"""Of CIFAR-100, so that a short training shows differences."""


@dataclass(frozen=True)
class Tuning:
    """How one model is tuned: by each sliding horizon, and by what they are compared with."""

    name: Literal["resnet", "vit"]
    model: BlockModel
    data: DataSource
    optimizer: OptimizerConfig
    """But for the rate."""
    rates: tuple[float, ...]
    """All windows are trained with each, on every seed; of each, the better counts."""
    horizons: tuple[int, ...]
    """In units; the last is the whole depth, which is back-propagation."""
    unit: int
    """Blocks per unit."""
    tumbling: tuple[int, ...]
    """Sizes of tumbling windows, in units."""
    shared: tuple[int, ...]
    """Horizons that are tried with the shared readout besides."""
    batch_size: int
    steps: int
    seeds: tuple[int, ...]
    test_batches: int
    """Of 500 images."""

    def build_cells(self) -> Iterator[tuple[str, Cell]]:
        """By name; the findings are read from it and from the cell."""
        *_, most = self.horizons
        lengths = tuple(self._slide(horizon) for horizon in range(1, most + 1))
        groups = tuple(WindowChoice("tumbling", size, self.unit) for size in self.tumbling)
        yield f"memory: {self.name}", HeldMemoryCell(self.model, self.data, self.batch_size, (*lengths, *groups))
        for rate, seed in product(self.rates, self.seeds):
            train = partial(self._train, rate=rate, seed=seed)
            for horizon in self.horizons:
                yield train(f"h = {horizon}", self._slide(horizon))
            for choice in groups:
                yield train(f"tumbling {choice.size}", choice)
            for horizon in self.shared:
                yield train(f"h = {horizon}, shared", self._slide(horizon), readout="shared")
            yield train(HEAD_ALONE, self._slide(most), model=HeadOnly(self.model))

    def _slide(self, horizon: int) -> WindowChoice:
        return WindowChoice("sliding", horizon, self.unit)

    def _train(
        self,
        words: str,
        choice: WindowChoice,
        *,
        rate: float,
        seed: int,
        model: BlockModel | None = None,
        readout: ReadoutKind = "local",
    ) -> tuple[str, Cell]:
        cell = TrainingCell(
            model or self.model,
            self.data,
            choice,
            replace(self.optimizer, lr=rate),
            self.batch_size,
            self.steps,
            seed,
            readout=ReadoutConfig(readout),
            num_evaluations=1,
            test_batches=self.test_batches,
        )
        return f"{self.name}: {words}, rate {rate:g}, seed {seed}", cell


def build_cells(pretraining: Pretraining, tunings: Sequence[Tuning], everything: PretrainedViT) -> dict[str, Cell]:
    """The pretraining first, since others wait for it; `everything` is the ViT without adapters, for its memory."""
    cells: dict[str, Cell] = {PRETRAINING: pretraining}
    for tuning in tunings:
        cells |= dict(tuning.build_cells())
        if tuning.name == "vit":
            ends = (WindowChoice("sliding", 1), WindowChoice("sliding", tuning.horizons[-1]))
            cells["memory: vit, all weights"] = HeldMemoryCell(everything, tuning.data, tuning.batch_size, ends)
    return cells


def _build_cells(quick: bool) -> Mapping[str, Cell]:
    """Full: two seeds, about half an hour of a processor; quick: one seed, fewer steps and horizons."""
    pretraining = Pretraining(
        {
            "num_hidden_layers": 4 if quick else 12,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 10,
        },
        Cifar10Data(num_train_files=1, augment=True),
        OptimizerConfig("adamw", lr=1e-3),
        batch_size=64,
        steps=150 if quick else 800,
        seed=0,
    )
    resnet = Tuning(
        "resnet",
        ResNetCifar(blocks_per_group=9, checkpoint=CHECKPOINT, weights="fresh_head"),
        Cifar100Data(num_classes=NUM_CLASSES),
        OptimizerConfig("sgd", momentum=0.9),
        rates=(0.005, 0.02),
        horizons=(1, 3, 9) if quick else (1, 3, 5, 9),
        unit=3,
        tumbling=() if quick else (3,),
        shared=(),
        batch_size=32,
        steps=8 if quick else 30,
        seeds=(0,) if quick else (0, 1),
        test_batches=1,
    )
    adapted = PretrainedViT(pretraining, NUM_CLASSES, LoraConfig(r=8, targets=("q_proj", "v_proj", "fc1", "fc2")))
    vit = Tuning(
        "vit",
        adapted,
        Cifar100Data(num_classes=NUM_CLASSES),
        OptimizerConfig("adamw"),
        rates=(1e-3, 5e-3),
        horizons=(1, 2, 4) if quick else (1, 2, 4, 6, 12),
        unit=1,
        tumbling=(2,) if quick else (4,),
        shared=(1,),
        batch_size=64,
        steps=40 if quick else 70,
        seeds=(0,) if quick else (0, 1),
        test_batches=1,
    )
    return build_cells(pretraining, (resnet, vit), replace(adapted, lora=LoraConfig()))


FINETUNE = Experiment(
    "finetune",
    "Fine-tuning across horizons: accuracy and memory (fig. 3, 4)",
    _build_cells,
    conclude,
    needs=("data/cifar-10-batches-py", "data/cifar-100-python", CHECKPOINT),
)
