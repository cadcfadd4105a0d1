"""Fine-tuning across horizons: the tiny variant end to end, its start, and verdicts that follow the records."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpc_dist.data import Batches, DigitsData
from mpc_dist.models import ResNetCifar, build_chain
from mpc_dist.models.hugging_face import LoraConfig
from mpc_dist.models.hugging_face.checkpoint import WEIGHTS
from mpc_dist.profile import measure_memory
from mpc_dist.study.cell import Record, Store
from mpc_dist.study.experiment import Experiment, write_page
from mpc_dist.study.finetune import Tuning, build_cells
from mpc_dist.study.finetune_findings import conclude
from mpc_dist.study.memory_cell import HeldMemoryCell
from mpc_dist.study.pretraining import HeadOnly, PretrainedViT, Pretraining
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.training.sections import OptimizerConfig

DATA = DigitsData(num_test=1500)
RESNET = ResNetCifar(blocks_per_group=1, channels=2)
VIT = {
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": 10,
}
LORA = LoraConfig(r=2, targets=("q_proj", "fc1"))
ADAM = OptimizerConfig("adamw", lr=1e-2)


def build_pretraining(folder: Path) -> Pretraining:
    return Pretraining(VIT, DATA, ADAM, batch_size=16, steps=4, seed=0, folder=str(folder))


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Pretraining:
    return build_pretraining(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def records(pretraining: Pretraining, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    resnet = Tuning(
        "resnet",
        RESNET,
        DATA,
        OptimizerConfig("sgd"),
        rates=(0.05, 0.1),
        horizons=(1, 2, 3),
        unit=1,
        tumbling=(2,),
        shared=(),
        batch_size=16,
        steps=2,
        seeds=(0, 1),
        test_batches=1,
    )
    adapted = PretrainedViT(pretraining, 10, LORA)
    vit = replace(resnet, name="vit", model=adapted, optimizer=ADAM, rates=(0.01,), shared=(1,), seeds=(0,))
    cells = build_cells(pretraining, (resnet, vit), replace(adapted, lora=LoraConfig()))
    store = Store(tmp_path_factory.mktemp("finetune") / "cells.jsonl")
    for name, cell in cells.items():
        store.add(name, cell, cell.run(), seconds=1.0)
    return {name: store.find(cell) for name, cell in cells.items()}


def test_the_tiny_variant_writes_its_page(records: dict[str, Record], tmp_path: Path):
    findings = conclude(records)
    experiment = Experiment("finetune", "Tiny", lambda _: {}, conclude)
    page = write_page(experiment, findings, records, tmp_path, quick=True).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "horizons.png", "tradeoff.png"}
    means = [
        sum(records[f"resnet: h = 3, rate {rate:g}, seed {seed}"].result["accuracy"][-1] for seed in (0, 1)) / 2
        for rate in (0.05, 0.1)
    ]
    assert f"| h = 3 (back-propagation) | {max(means):.1%} (" in page
    assert f"| h = 3 | 0.05: {means[0]:.1%}, 0.1: {means[1]:.1%} |" in page
    assert "| h = 1, shared |" in page
    assert len(findings.verdicts) == 4
    assert "pretrained here" in page


def set_accuracies(records: dict[str, Record], accuracy: dict[str, float]) -> dict[str, Record]:
    """The records as if each windows' runs had ended so."""
    out = {}
    for name, record in records.items():
        words = name.partition(": ")[2].partition(", rate")[0]
        changed = {"accuracy": [0.0, accuracy[words]]} if words in accuracy else {}
        out[name] = replace(record, result={**record.result, **changed})
    return out


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        ((0.30, 0.39, 0.40, 0.20), ("confirmed", "confirmed", "confirmed")),
        ((0.39, 0.35, 0.40, 0.20), ("confirmed with limits", "confirmed with limits", "not confirmed")),
        ((0.30, 0.10, 0.40, 0.20), ("not confirmed", "confirmed with limits", "confirmed")),
        ((0.40, 0.30, 0.20, 0.10), ("confirmed", "not confirmed", "not confirmed")),
        # Where the head alone does as well, nothing was tuned that a horizon could be near to.
        ((0.30, 0.39, 0.40, 0.45), ("not confirmed", "confirmed", "confirmed")),
    ],
)
def test_verdicts_follow_the_records(records: dict[str, Record], accuracies: tuple[float, ...], words: tuple[str, ...]):
    changed = set_accuracies(records, dict(zip(("h = 1", "h = 2", "h = 3", "head alone"), accuracies, strict=True)))
    for name in ("memory: resnet", "memory: vit"):
        held = {f"sliding {h}": 100 * h for h in (1, 2, 3)} | {"tumbling 2": 200}
        changed[name] = replace(changed[name], result={**changed[name].result, "held": held})
    moderate, memory, order, smallest = conclude(changed).verdicts
    assert (moderate.verdict, order.verdict, smallest.verdict) == words
    assert memory.verdict == "confirmed"
    assert f"h = 2 {accuracies[1]:.1%}" in moderate.evidence


def test_what_was_pretrained_is_read_again_and_made_again_to_the_same_if_it_is_gone_or_damaged(tmp_path: Path):
    cell = build_pretraining(tmp_path)
    first = cell.run()
    weights = cell.provide() / WEIGHTS
    kept, time = weights.read_bytes(), weights.stat().st_mtime_ns
    assert cell.run() == first
    assert weights.stat().st_mtime_ns == time
    weights.write_bytes(kept[:-1])
    assert cell.run() == first
    assert weights.read_bytes() == kept
    weights.unlink()
    assert cell.run() == first
    assert weights.read_bytes() == kept
    assert replace(cell, steps=3).provide() != cell.provide()


def test_the_tuned_vit_begins_with_the_pretrained_blocks_and_trains_adapters_and_heads_alone(pretraining: Pretraining):
    cell = TrainingCell(
        PretrainedViT(pretraining, 10, LORA), DATA, WindowChoice("sliding", 2), ADAM, 16, 2, seed=0, test_batches=1
    )
    before = build_chain(cell.model, DATA.load().task, seed=0).state_dict()
    whole = build_chain(PretrainedViT(pretraining, 10), DATA.load().task, seed=0)
    after = cell.train()[0].state_dict()
    for name, value in whole.blocks.state_dict().items():
        parts = name.rsplit(".", 1)
        adapted = f"blocks.{parts[0]}.base_layer.{parts[1]}"
        own = adapted if adapted in before else f"blocks.{name}"
        assert torch.equal(before[own], value), name
        assert torch.equal(after[own], value), name
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert all(".lora_" in name or name.startswith("readouts.") for name in moved)
    assert any(".lora_B" in name for name in moved)


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_batch_norm_statistics_are_updated_once_per_step_whatever_the_horizon(horizon: int):
    cell = TrainingCell(RESNET, DATA, WindowChoice("sliding", horizon), OptimizerConfig("sgd", lr=0.1), 16, 3, seed=0)
    chain, _ = cell.train()
    counts = [int(value) for name, value in chain.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts == [3] * 7  # a stem and three blocks of two


def test_with_frozen_blocks_only_the_head_trains():
    cell = TrainingCell(HeadOnly(RESNET), DATA, WindowChoice("backprop"), OptimizerConfig("sgd", lr=0.1), 16, 2, seed=0)
    before = dict(build_chain(RESNET, DATA.load().task, seed=0).named_parameters())
    after = dict(cell.train()[0].named_parameters())
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == {"readouts.3.linear.weight", "readouts.3.linear.bias"}


def test_held_memory_is_that_of_the_profile_and_frozen_weights_have_no_gradients(pretraining: Pretraining):
    choices = tuple(WindowChoice("sliding", h) for h in (1, 2, 3))
    model = PretrainedViT(pretraining, 10, LORA)
    result = HeldMemoryCell(model, DATA, 8, choices).run()
    data = DATA.load()
    inputs, labels = next(Batches(data.train, batch_size=8, seed=0))
    chain = build_chain(model, data.task)
    expected = measure_memory(chain, inputs, labels, horizons=(1, 2, 3))
    assert result["held"] == {f"sliding {h}": expected[h] for h in (1, 2, 3)}
    own = [*chain.blocks.parameters(), *chain.readouts["3"].linear.parameters()]
    assert result["gradients"] == sum(p.nbytes for p in own if p.requires_grad)
    everything = HeldMemoryCell(replace(model, lora=LoraConfig()), DATA, 8, choices).run()
    assert result["gradients"] < everything["gradients"] == everything["weights"]
    assert result["held"]["sliding 3"] < everything["held"]["sliding 3"]
