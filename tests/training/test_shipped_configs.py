"""Every shipped configuration of laptop size trains on the ranks that it asks for; the others are parsed elsewhere."""

from pathlib import Path

import pytest

from mpc_dist.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.training.local import train_locally

FEW = "--training.steps 2 --training.log_every 1 --training.eval_batches 1 --checkpoints.every 0 --device cpu".split()
GPU_SIZED = ("gpu", "gpt2_xl_plan")
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.stem.endswith(GPU_SIZED))


def test_there_are_configurations_of_both_sizes():
    assert len(CONFIGS) >= 10
    assert len(CONFIGS) < len(list((ROOT / "configs").glob("*.yaml")))


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
