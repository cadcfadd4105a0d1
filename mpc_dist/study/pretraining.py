"""A ViT trained here once, kept on disk under the name of its recipe, and where other cells begin from.

What is kept is complete or absent: it is written aside and moved into place, and read only if its digest agrees.
"""

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpc_dist.data import DataSource
from mpc_dist.models import BlockModel, HuggingFace
from mpc_dist.models.hugging_face import LoraConfig, adapt, write_pretrained
from mpc_dist.models.hugging_face.checkpoint import WEIGHTS
from mpc_dist.study.cell import Result, describe
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.task import Task
from mpc_dist.training.sections import OptimizerConfig

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Pretraining:
    """A cell that trains a ViT of transformers from scratch by back-propagation; also how other cells get at it.

    Whoever asks first trains it, others wait for that; if what was kept is gone, it is trained again to the same.
    """

    overrides: dict[str, Any]
    """Sizes, as fields of transformers' ViTConfig."""
    data: DataSource
    optimizer: OptimizerConfig
    batch_size: int
    steps: int
    seed: int
    folder: str = "runs/pretrained"
    """Where such models are kept, each in a folder named by its recipe."""

    def run(self) -> Result:
        """Loss and accuracy over the steps, and the digest of the weights."""
        outcome: Result = json.loads((self.provide() / OUTCOME).read_text(encoding="utf-8"))
        return outcome

    def provide(self) -> Path:
        """A folder that `from_pretrained` loads; trained now if it is not there whole."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        place = Path(self.folder) / self._name
        with _alone(place.with_suffix(".lock")):
            if not _is_whole(place):
                self._make(place)
        return place

    @property
    def _name(self) -> str:
        """By all that the weights depend on: the recipe and torch, not the place."""
        recipe = {**describe(replace(self, folder="")), "torch": torch.__version__}
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]

    def _make(self, place: Path) -> None:
        model = HuggingFace(architecture="vit", overrides=self.overrides)
        cell = TrainingCell(
            model,
            self.data,
            WindowChoice("backprop"),
            self.optimizer,
            self.batch_size,
            self.steps,
            self.seed,
            num_evaluations=4,
        )
        chain, outcome = cell.train()
        with tempfile.TemporaryDirectory(dir=place.parent) as aside:
            built = Path(aside) / "model"
            write_pretrained(model, chain.state_dict(), built)
            (built / OUTCOME).write_text(json.dumps(outcome | {"sha256": _digest(built)}) + "\n", encoding="utf-8")
            shutil.rmtree(place, ignore_errors=True)
            built.replace(place)


def _is_whole(place: Path) -> bool:
    if not (place / OUTCOME).is_file() or not (place / WEIGHTS).is_file():
        return False
    return bool(json.loads((place / OUTCOME).read_text(encoding="utf-8"))["sha256"] == _digest(place))


def _digest(place: Path) -> str:
    return hashlib.sha256((place / WEIGHTS).read_bytes()).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file; the system lets go of it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class PretrainedViT:
    """What a pretraining gave, as a model family: with a fresh head for other classes, and with adapters if any."""

    pretraining: Pretraining
    num_classes: int
    lora: LoraConfig = field(default_factory=LoraConfig)

    @cached_property
    def model(self) -> BlockModel:
        """Reads the weights that are kept, or has them trained."""
        base = HuggingFace(
            path=str(self.pretraining.provide()), overrides={"num_labels": self.num_classes}, weights="fresh_head"
        )
        return adapt(base, self.lora)

    @property
    def num_blocks(self) -> int:
        """Its layers."""
        return self.model.num_blocks

    def check_task(self, task: Task) -> None:
        """Accept what the model accepts."""
        self.model.check_task(task)

    def width_at(self, boundary: int, task: Task) -> int:
        """That of the model."""
        return self.model.width_at(boundary, task)

    def build_block(self, index: int, task: Task) -> nn.Module:
        """The trained block."""
        return self.model.build_block(index, task)

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """The model's head with a fresh linear map, or a fresh one."""
        return self.model.build_head(boundary, task)


@dataclass(frozen=True)
class HeadOnly:
    """A model whose blocks are frozen: what training the readouts alone gives. Batch norms see the new data still."""

    model: BlockModel

    @property
    def num_blocks(self) -> int:
        """That of the model."""
        return self.model.num_blocks

    def check_task(self, task: Task) -> None:
        """Accept what the model accepts."""
        self.model.check_task(task)

    def width_at(self, boundary: int, task: Task) -> int:
        """That of the model."""
        return self.model.width_at(boundary, task)

    def build_block(self, index: int, task: Task) -> nn.Module:
        """The model's block, frozen."""
        return self.model.build_block(index, task).requires_grad_(False)

    def build_head(self, boundary: int, task: Task) -> nn.Module:
        """The model's head."""
        return self.model.build_head(boundary, task)
