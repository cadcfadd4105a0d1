"""Bytes and times of blocks: what the planner predicts from them is what a pipeline then holds."""

import pytest
import torch
from torch import nn

from mpc_dist.models import GPT, ResMLP, build_chain
from mpc_dist.planner.pricing import predict_bytes
from mpc_dist.profile import SavedBytes, measure_memory
from mpc_dist.profile.blocks import measure_blocks, without_allocating
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.schedule import build_schedule, lay_out, simulate
from mpc_dist.task import Task
from mpc_dist.windows import backprop, cumulative, expand, sliding, tumbling
from tests.examples import draw_batch

TEXT = Task("tokens", (24,), 64)
VECTORS = Task("regression", (16,), 16)
EXAMPLES = {
    "gpt": (GPT(num_blocks=6, width=16, num_heads=2), TEXT),
    "res_mlp": (ResMLP(num_blocks=6, width=16), VECTORS),
}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_sweeps_memory_follows_from_the_blocks(name):
    model, task = EXAMPLES[name]
    chain = build_chain(model, task)
    inputs, labels = draw_batch(task, batch_size=8)
    found = measure_blocks(chain, inputs, labels, adamw, repeats=1)
    swept = measure_memory(chain, inputs, labels, horizons=range(1, 7))
    assert {h: found.sweep_bytes(h) for h in swept} == pytest.approx(swept, rel=0.05)
    for costs, part in zip((*found.blocks, *found.readouts), (*chain.blocks, *chain.readouts.values()), strict=True):
        sizes = [parameter.nbytes for parameter in part.parameters()]
        assert costs.optimizer_bytes == sum(2 * size + 4 for size in sizes)  # two averages and a count
    assert all(block.forward > 0 and block.weight_grad >= 0 for block in found.blocks)


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_allocating_the_bytes_are_the_same(name):
    model, task = EXAMPLES[name]
    inputs, labels = draw_batch(task, batch_size=4)
    real = measure_blocks(build_chain(model, task), inputs, labels, adamw, repeats=1)
    with without_allocating() as mode:
        shadow = build_chain(model, task)
        shapes = [mode.from_tensor(part) for part in (inputs, labels)]
        found = measure_blocks(shadow, *shapes, adamw, flops_per_second=1e9)
        with pytest.raises(ValueError, match="fake tensors do not run"):
            measure_blocks(shadow, *shapes, adamw)
    for block, wanted in zip(found.blocks, real.blocks, strict=True):
        assert block.saved_bytes == wanted.saved_bytes
        assert (block.output_bytes, block.parameter_bytes) == (wanted.output_bytes, wanted.parameter_bytes)
    # A linear layer's gradients cost what its forward costs, each.
    middle = found.blocks[2]
    if name == "res_mlp":
        assert middle.forward == middle.input_grad == middle.weight_grad == 2 * 4 * 16 * 16 / 1e9


def test_a_part_of_a_batch_costs_its_share():
    model, task = EXAMPLES["gpt"]
    with without_allocating() as mode:
        chain = build_chain(model, task)
        inputs, labels = (mode.from_tensor(part) for part in draw_batch(task, batch_size=8))
        whole = measure_blocks(chain, inputs, labels, adamw, flops_per_second=1e9)
        quarter = measure_blocks(chain, inputs[:2], labels[:2], adamw, flops_per_second=1e9)
    cut = whole.cut_into(4)
    assert cut.samples == quarter.samples == 2
    for block, wanted in zip(cut.blocks, quarter.blocks, strict=True):
        assert block.forward == pytest.approx(wanted.forward)
        assert block.saved_bytes == pytest.approx(wanted.saved_bytes, rel=0.02)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("partition", [(2, 2, 2), (1, 3, 2), (6,)], ids=str)
@pytest.mark.parametrize("kind", ["backprop", "stages 1", "stages 2", "sliding 2", "tumbling 3", "cumulative 2"])
@pytest.mark.parametrize("split", [False, True])
def test_predicted_bytes_are_what_a_pipeline_holds(name, partition, kind, split):
    model, task = EXAMPLES[name]
    M, word = 4, kind.split()[-1]
    if kind.startswith("stages"):
        windows = expand(sliding(len(partition), min(int(word), len(partition))), partition)
    else:
        windows = {
            "backprop": backprop(6),
            "sliding 2": sliding(6, 2),
            "tumbling 3": tumbling(6, 3),
            "cumulative 2": cumulative(6, 2),
        }[kind]
    chain = build_chain(model, task)
    inputs, labels = draw_batch(task, batch_size=4 * M)
    found = measure_blocks(chain, inputs[:4], labels[:4], adamw, repeats=1)
    layout = lay_out(windows, partition)
    costs = found.segment_costs(layout)
    schedule = build_schedule(layout, M, split=split, costs=costs)
    price = simulate(schedule, layout, costs)
    pipeline = InProcessPipeline(chain, layout, schedule, optimizer=adamw)
    meters = [SavedBytes([*chain.parameters(), *chain.buffers(), inputs, labels]) for _ in partition]
    pipeline.step(inputs, labels, contexts=meters)
    whole = predict_bytes(found, layout, schedule, price)
    for rank, meter in enumerate(meters):
        assert price.peak_bytes[rank] == pytest.approx(meter.peak, rel=0.1)
        assert whole[rank] > price.peak_bytes[rank]
