"""`mpc-dist export`: the whole model of a run's checkpoint as safetensors, or as transformers and peft load it."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from mpc_dist.models import HuggingFace
from mpc_dist.models.hugging_face import write_adapters, write_pretrained
from mpc_dist.runtime.state import BUFFERS
from mpc_dist.training.checkpoint import SavedCheckpoint, find_run_checkpoints, newest_undamaged
from mpc_dist.training.checkpoint_folder import folder_of, read_state
from mpc_dist.training.config import Config, ConfigParser

SUMMARY = "write the trained weights of a run as safetensors"
WEIGHTS = "model.safetensors"
CONFIG = "config.yaml"
ADAPTERS = "adapters"


def run(argv: Sequence[str]) -> None:
    """Read the options, find the checkpoint, write the folder."""
    parser = argparse.ArgumentParser(
        prog="mpc-dist export",
        description="Write the whole model of a run. Models of transformers are written as `from_pretrained` loads "
        f"them, with LoRA's adapters for peft in {ADAPTERS}/. Others, and any with --chain, are one safetensors file "
        "with the names of mpc_dist.models.Chain: `chain.load_state_dict(safetensors.torch.load_file(...))`.",
    )
    parser.add_argument("run", type=Path, help="Run folder, or one checkpoint of it.")
    parser.add_argument("--to", type=Path, required=True, help="Folder to write; it is made.")
    parser.add_argument("--step", type=int, help="Take the checkpoint after this step; default: the newest undamaged.")
    parser.add_argument("--chain", action="store_true", help="Keep the names of the chain, interior readouts included.")
    options = parser.parse_args(argv)
    if (options.to / WEIGHTS).exists():
        raise ValueError(f"{options.to} already holds {WEIGHTS}, which would be lost; give another folder")
    saved = _find(options.run, options.step)
    tensors = read_model(saved)
    config = _read_config(saved.path)
    if config is not None and isinstance(config.model, HuggingFace) and not options.chain:
        write_pretrained(config.model, tensors, options.to)
        if config.lora.r:
            write_adapters(config.model, config.lora, tensors, options.to / ADAPTERS)
    else:
        options.to.mkdir(parents=True, exist_ok=True)
        save_file(tensors, options.to / WEIGHTS, metadata={"format": "pt", "step": str(saved.state.step)})
        if config is not None:
            shutil.copy(_config_of(saved.path), options.to / CONFIG)
    size = sum(tensor.nbytes for tensor in tensors.values())
    Console().print(
        f"{len(tensors)} tensors ({size / 2**20:.1f} MiB) after step {saved.state.step}: {options.to}",
        highlight=False,
        soft_wrap=True,
    )


def read_model(saved: SavedCheckpoint) -> dict[str, Tensor]:
    """Weights and buffers by their names in the chain; of several replicas, the first one's buffers."""
    prefix = f"{BUFFERS}.0."
    weights = [name for name in saved.described if name.startswith(("blocks.", "readouts."))]
    buffers = [name for name in saved.described if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensor for name, tensor in saved.read_all(weights + buffers).items()}


def _config_of(checkpoint: Path) -> Path:
    return checkpoint.parent.parent / CONFIG


def _read_config(checkpoint: Path) -> Config | None:
    """The configuration of the checkpoint's run; None if the checkpoint was taken out of it."""
    path = _config_of(checkpoint)
    if not path.is_file():
        return None
    config, _ = ConfigParser(["--config", str(path), "--device", "auto"], prog="export", description="").parse()
    return config


def _find(place: Path, step: int | None) -> SavedCheckpoint:
    found = find_run_checkpoints(place)
    if not found:
        raise ValueError(f"{place} holds no checkpoint; give a run folder (training.folder) or one of its checkpoints")
    if step is not None:
        steps = [read_state(path).step for path in found]
        if step not in steps:
            raise ValueError(f"{folder_of(place)} has checkpoints after steps {steps}, none after {step}")
        found = [found[steps.index(step)]]
    saved, damages = newest_undamaged(found)
    if saved is None:
        raise ValueError(damages[0])
    for damage in damages:
        Console(stderr=True).print(damage, highlight=False, markup=False, soft_wrap=True)
    return saved
