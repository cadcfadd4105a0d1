"""One of each file that mpc_dist reads, small and valid: what the fuzzer spoils."""

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mpc_dist.models import ResNetCifar, build_chain
from mpc_dist.task import Task
from tests.robustness import entry
from tests.training.local import train_locally

WORDS = {
    "gpt": "--model.name gpt --model.num_blocks 2 --model.width 8 --model.num_heads 2 --data.context 8 --batch_size 4",
    "resnet": "--model.name resnet_cifar --model.blocks_per_group 1 --model.channels 4 --batch_size 4",
}
PLANNING = "--gpu-memory 1GiB --max-gpus 1 --batches 1"


@dataclass(frozen=True)
class Workshop:
    """The folder of all of them."""

    root: Path

    @property
    def text(self) -> Path:
        """A text."""
        return self.root / "text.txt"

    @property
    def cifar(self) -> Path:
        """CIFAR-10's folder, of one training file."""
        return self.root / "cifar"

    @property
    def pictures(self) -> Path:
        """A folder of pictures."""
        return self.root / "pictures"

    @property
    def trained(self) -> Path:
        """A .th file."""
        return self.root / "resnet.th"

    @property
    def run(self) -> Path:
        """A run of two checkpoints."""
        return self.root / "run"

    @property
    def plan(self) -> Path:
        """A plan for two ranks of the gpt."""
        return self.root / "plan.yaml"

    @property
    def profiles(self) -> Path:
        """What planning measured."""
        return self.root / "profiles"

    @property
    def gpt(self) -> list[str]:
        """The options of the run."""
        return [*WORDS["gpt"].split(), "--data.path", str(self.text), "--device", "cpu", "--training.eval_batches", "1"]

    @property
    def planning(self) -> list[str]:
        """The options by which the plan was made."""
        return [*self.gpt, *PLANNING.split(), "--profiles", str(self.profiles)]

    @property
    def config(self) -> dict[str, Any]:
        """A configuration with every section."""
        return {
            "model": {"name": "gpt", "num_blocks": 2, "width": 8, "num_heads": 2, "dropout": 0.1},
            "data": {"name": "text", "path": str(self.text), "context": 8, "test_fraction": 0.2, "max_bytes": 4000},
            "readout": {"kind": "local"},
            "angles": {"num_batches": 1, "horizons": [1, 2]},
            "horizon": {"windows": "sliding", "size": 1, "unit": "blocks", "mode": "fixed", "every": 10},
            "parallel": {"stages": 1, "partition": [2], "microbatches": 2, "cap": 2, "timeout": 60.0},
            "data_parallel": {"degree": 1, "sharding": "none"},
            "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1, "scheduler": None},
            "training": {"steps": 3, "log_every": 1, "eval_every": 2, "precision": "float32"},
            "checkpoints": {"every": 2, "keep": 2, "resume": "auto"},
            "tracking": {"wandb": False, "project": "mpc_dist", "tags": ["a", "b"]},
            "batch_size": 4,
            "seed": 1,
            "device": "cpu",
        }


def build_workshop(root: Path) -> Workshop:
    """Make all files, the trained ones by training."""
    shop = Workshop(root)
    shop.text.write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    _write_cifar(shop.cifar)
    _write_pictures(shop.pictures)
    _write_trained(shop.trained)
    train_locally([*shop.gpt, "--training.steps", "2", "--checkpoints.every", "1"], shop.run)
    answer = entry.mpc_dist("plan", *shop.planning, "--out", str(shop.plan))
    assert answer.is_valid, answer
    return shop


def _write_cifar(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("data_batch_1", "test_batch"):
        content = {b"data": rng.integers(0, 256, (8, 3072), dtype=np.uint8), b"labels": list(range(8))}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def _write_pictures(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (folder / kind).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / kind / f"{number}.png")


def _write_trained(path: Path) -> None:
    chain = build_chain(ResNetCifar(blocks_per_group=1, channels=4), Task("classification", (3, 32, 32), 10))
    places = {"blocks.0.0.": "", "blocks.0.1.": "layer1.0.", "blocks.1.": "layer2.0.", "blocks.2.": "layer3.0."}
    places |= {"readouts.3.": ""}
    weights = {}
    for name, tensor in chain.state_dict().items():
        place = next((one for one in places if name.startswith(one)), None)
        if place is not None:
            weights[f"module.{places[place]}{name.removeprefix(place)}"] = tensor
    torch.save({"state_dict": weights, "best_prec1": 0.1}, path)


def copy_run(shop: Workshop, to: Path, *, keep: int = 2) -> list[Path]:
    """The run in another folder, with its newest checkpoints; their folders, oldest first."""
    shutil.copytree(shop.run, to)
    found = sorted((to / "checkpoints").iterdir())
    for old in found[:-keep]:
        shutil.rmtree(old)
    return found[-keep:]


def read_json(path: Path) -> Any:
    """A JSON file's content."""
    return json.loads(path.read_text(encoding="utf-8"))
