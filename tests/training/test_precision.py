"""Runs in every precision: windows that grow, and checkpoints of one precision that another goes on from."""

from pathlib import Path

import pytest
import torch

from mpc_dist.data.reading import Part
from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.metrics import read_metrics
from tests.training.local import losses, train_locally

GPT = (
    "--model.name gpt --model.num_blocks 4 --model.width 16 --model.num_heads 2 --data.name text --data.context 16 "
    "--data.max_bytes 40000 --batch_size 8 --parallel.microbatches 2 --parallel.stages 2 --parallel.split true "
    "--training.log_every 1 --training.eval_batches 1 --device cpu"
).split()
KINDS = {
    "float32": [],
    "bfloat16": ["--training.precision", "bfloat16"],
    "bfloat16 weights": ["--training.precision", "bfloat16", "--training.bfloat16_weights", "true"],
}


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16 weights"])
def test_an_adaptive_horizon_grows(kind, tmp_path: Path):
    adaptive = "--horizon.mode adaptive --horizon.every 2 --training.steps 4 --optimizer.lr 0".split()
    train_locally([*GPT, *KINDS[kind], *adaptive, "--checkpoints.every", "0"], tmp_path)
    decided = [line for line in read_metrics(tmp_path, 0) if line["event"] == "horizon"]
    assert [line["size"] for line in decided] == [1, 2]  # nothing is learnt, so the loss does not fall
    assert all(0 < line["cosine"] < 1 for line in decided)


def test_a_checkpoint_of_one_precision_is_gone_on_from_in_another(tmp_path: Path):
    for steps, kind in ((2, "float32"), (4, "bfloat16"), (6, "bfloat16 weights"), (8, "bfloat16")):
        train_locally([*GPT, *KINDS[kind], "--horizon", "1", "--training.steps", str(steps)], tmp_path)
        saved = SavedCheckpoint(list_checkpoints(folder_of(tmp_path))[-1])
        weight = saved.described["blocks.3.attention.qkv.weight"]
        moment = saved.described["optimizer.blocks.3.attention.qkv.weight.exp_avg"]
        expected = torch.bfloat16 if kind == "bfloat16 weights" else torch.float32
        assert (weight.dtype, moment.dtype) == (expected, expected)
    found = losses(tmp_path, 2)
    assert {step for step, *_ in found} == set(range(1, 9))
    assert found[8, "4", 0] < found[1, "4", 0]


def test_what_is_predicted_keeps_its_digits():
    part = Part(torch.rand(3), torch.rand(3), 3)
    for kind, of_labels in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        cast = part.to(kind)
        assert (cast.inputs.dtype, cast.labels.dtype) == (kind, of_labels)
