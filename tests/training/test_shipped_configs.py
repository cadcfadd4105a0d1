"""Every shipped configuration of laptop size trains on the ranks that it asks for; for the others a step is run dry.

Dry: every action of the step's schedule, on all stages, with tensors that have shapes but no memory.
"""

from pathlib import Path

import pytest
import torch

from mpc_dist.models import build_chain
from mpc_dist.profile.blocks import without_allocating
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.task import Task
from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.runtime.reference import KeepGradients
from tests.training.local import parse, train_locally

FEW = "--training.steps 2 --training.log_every 1 --training.eval_batches 1 --checkpoints.every 0 --device cpu".split()
GPU_SIZED = ("gpu", "gpt2_xl_plan")
ALL = sorted((ROOT / "configs").glob("*.yaml"))
CONFIGS = [path for path in ALL if not path.stem.endswith(GPU_SIZED)]
TASKS = {
    "text": Task("tokens", (1024,), 256),
    "hf_text": Task("tokens", (1024,), 128_256),
    "image_folder": Task("classification", (3, 224, 224), 1000),
    "cifar10": Task("classification", (3, 32, 32), 10),
    "linear": Task("regression", (4096,), 4096),
    "trigonometric": Task("regression", (10,), 10),
}
"""What the data of the large ones look like: it is not here, or would take long to draw."""


def test_there_are_configurations_of_both_sizes():
    assert len(CONFIGS) >= 10
    assert len(ALL) - len(CONFIGS) >= 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_trains(path: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    data = []
    if "cifar" in path.stem:
        folder = request.getfixturevalue("cifar") / "cifar-10-batches-py"
        data = ["--data.folder", str(folder), "--data.num_train_files", "1"]
    config = train_locally(["--config", str(path), *FEW, *data], tmp_path)
    lines = [read_metrics(tmp_path, rank) for rank in range(config.num_ranks)]
    assert all(line[-1]["event"] == "end" for line in lines)
    losses = [line["losses"] for found in lines for line in found if line["event"] == "step"]
    assert any(str(config.model.num_blocks) in loss for loss in losses)


@pytest.mark.parametrize("path", [path for path in ALL if path not in CONFIGS], ids=lambda path: path.stem)
def test_a_step_of_a_large_one_runs_dry(path: Path):
    config = parse(["--config", str(path), "--device", "cpu"])
    task = TASKS[config.as_dict()["data"]["name"]]
    layout = lay_out(config.horizon.build(config.partition), config.partition)
    schedule = build_schedule(layout, config.parallel.microbatches, split=config.parallel.split)
    with without_allocating():
        # Without adapters: peft moves them between devices, which tensors without memory cannot be.
        chain = build_chain(config.model, task, readout=config.readout.kind, seed=config.seed)
        pipeline = InProcessPipeline(
            chain,
            layout,
            schedule,
            optimizer=KeepGradients,
            options=StageOptions(precision=config.training.build_precision(), checkpoint=config.training.recompute),
        )
        size = config.batch_size
        if task.kind == "tokens":
            inputs = labels = torch.zeros((size, *task.input_shape), dtype=torch.int64)
        else:
            inputs = torch.zeros(size, *task.input_shape)
            is_real = task.kind == "regression"
            labels = torch.zeros(size, task.num_outputs) if is_real else torch.zeros(size, dtype=torch.int64)
        pipeline.step(inputs, labels)
        read = {f"readouts.{layout.blocks[s - 1].stop}" for s in layout.windows.readouts}
        for name, parameter in chain.named_parameters():
            is_used = name.startswith("blocks.") or ".".join(name.split(".")[:2]) in read
            assert (parameter.grad is not None) == (is_used and parameter.requires_grad), name
    for stage in pipeline.stages:
        assert not stage.executor.left_over()
