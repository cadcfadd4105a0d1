"""Bytes held for backward: counted exactly, affine in the horizon, and small at horizon 1."""

import pytest
import torch
from torch import nn

from mpc_dist.models import GPT, Chain, ResMLP, build_chain
from mpc_dist.profile import SavedBytes, fit_line, measure_memory
from mpc_dist.profile.memory import peak_bytes
from mpc_dist.readout import mean_squared_error
from mpc_dist.task import Task
from mpc_dist.windows import backprop, forward_forward, sliding, tumbling
from tests.examples import build_example, draw_batch

REGRESSION = Task("regression", (1,), 4)  # the paper's trigonometric task
TEXT = Task("tokens", (32,), 64)


def test_saved_bytes_are_those_of_the_formula():
    """y = tanh(W x): W's gradient needs x, tanh's its output; parameters are not counted."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    x = torch.randn(7, 3)
    with SavedBytes(model.parameters()) as saved:
        y = model(x)
        assert saved.live == (7 * 3 + 7 * 5) * 4
    y.sum().backward()
    assert saved.live == 0
    assert saved.peak == (7 * 3 + 7 * 5) * 4


def test_a_storage_saved_twice_counts_once_until_its_last_holder_is_gone():
    model = nn.Linear(4, 4)
    x = torch.randn(6, 4)
    with SavedBytes(model.parameters()) as saved:
        first, second = model(x), model(x.view(3, 2, 4))
    assert saved.live == 6 * 4 * 4
    del first
    assert saved.live == 6 * 4 * 4
    del second
    assert saved.live == 0


def test_a_dropped_graph_is_released_without_a_backward_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1))  # softmax saves its own output
    with SavedBytes(model.parameters()) as saved:
        y = model(torch.randn(2, 4))
    assert saved.live > 0
    del y
    assert saved.live == 0


def test_nothing_is_counted_after_the_context():
    model = nn.Linear(4, 4)
    with SavedBytes(model.parameters()) as saved:
        pass
    kept = model(torch.randn(2, 4))
    assert kept.requires_grad
    assert saved.peak == 0


def test_the_sweep_holds_exactly_h_blocks():
    """Blocks y = tanh(W x) of one width: each holds its x and its output, and the next block's x is that output."""
    width, batch, T = 8, 3, 6
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(T)]
    model = Chain(blocks, mean_squared_error)
    inputs, labels = torch.randn(batch, width), torch.randn(batch, width)
    state = batch * width * 4
    for h in range(1, T):
        # The inputs of h blocks and the last one's output; the batch itself is not counted.
        assert peak_bytes(model, inputs, labels, sliding(T, h)) == (h + 1) * state
    assert peak_bytes(model, inputs, labels, backprop(T)) == T * state
    assert peak_bytes(model, inputs, labels, tumbling(T, 2)) == 3 * state


def test_weights_buffers_and_the_batch_are_not_counted():
    model, inputs, labels = build_example("resnet_cifar", readout="project")
    alone = peak_bytes(model, inputs, labels, forward_forward(6))
    large = torch.cat([inputs, torch.zeros(500, *inputs.shape[1:])])[: len(inputs)]  # a view of a large storage
    assert peak_bytes(model, large, labels, forward_forward(6)) == alone
    with SavedBytes([*model.parameters(), inputs, labels]) as with_buffers:
        loss = model.loss(model(inputs), labels)
    with SavedBytes([*model.parameters(), *model.buffers(), inputs, labels]) as without:
        loss = model.loss(model(inputs), labels)
    # In training, batch norm keeps its running statistics' tensors for backward.
    assert with_buffers.peak > without.peak
    del loss


def test_a_block_that_keeps_activations_is_named():
    class Hoarder(nn.Linear):
        def forward(self, state):
            self.kept = super().forward(state).tanh()
            return self.kept * 2

    model = Chain([Hoarder(3, 3)], mean_squared_error)
    with pytest.raises(ValueError, match="bytes are still held after the sweep: a block keeps activations of its own"):
        peak_bytes(model, torch.randn(2, 3), torch.randn(2, 3), backprop(1))


@pytest.mark.parametrize(
    ("model", "task", "readout"),
    [
        (ResMLP(num_blocks=15, width=10), REGRESSION, "pool"),
        (ResMLP(num_blocks=15, width=10), Task("regression", (10,), 10), "identity"),
        (GPT(num_blocks=8, width=32), TEXT, "shared"),
        (GPT(num_blocks=8, width=32), TEXT, "local"),
    ],
)
def test_memory_is_linear_in_the_horizon(model, task, readout):
    chain = build_chain(model, task, readout=readout)
    batch = draw_batch(task, batch_size=16)
    held = measure_memory(chain, *batch, horizons=range(1, chain.num_blocks + 1))
    fit = fit_line(held)
    assert fit.r_squared > 0.99
    assert fit.slope > 0


def test_thin_first_and_last_blocks_flatten_the_line():
    """res_mlp with local heads misses R^2 > 0.99: its interior blocks cost the same, its ends almost nothing."""
    task = Task("regression", (10,), 10)
    chain = build_chain(ResMLP(num_blocks=15, width=10), task, readout="local")
    held = measure_memory(chain, *draw_batch(task, batch_size=16), horizons=range(1, 16))
    increments = [held[h + 1] - held[h] for h in range(1, 15)]
    assert len(set(increments[:12])) == 1
    assert max(increments[12:]) < increments[0]
    assert 0.98 < fit_line(held).r_squared < 0.99


def test_horizon_one_on_a_16_block_gpt_holds_less_than_2_T_ths_of_backprop():
    T = 16
    chain = build_chain(GPT(num_blocks=T, width=64), TEXT)
    batch = draw_batch(TEXT)
    assert peak_bytes(chain, *batch, forward_forward(T)) < 2 / T * peak_bytes(chain, *batch, backprop(T))


def test_full_horizon_holds_what_plain_autograd_holds():
    model, inputs, labels = build_example("gpt")
    with SavedBytes([*model.parameters(), inputs, labels]) as plain:
        loss = model.loss(model(inputs), labels)
    assert peak_bytes(model, inputs, labels, backprop(5)) == plain.peak
    del loss


def test_measuring_leaves_batch_norm_statistics_alone():
    model, inputs, labels = build_example("resnet_cifar")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    steps: list[None] = []
    measure_memory(model, inputs, labels, horizons=[1, 3], advance=lambda: steps.append(None))
    assert len(steps) == 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocators_peak_grows_with_the_horizon():
    chain = build_chain(GPT(num_blocks=8, width=64), TEXT).cuda()
    inputs, labels = (part.cuda() for part in draw_batch(TEXT, batch_size=16))
    held = measure_memory(chain, inputs, labels, horizons=[1, 4, 8])
    assert held[1] < held[4] < held[8]


def test_a_line_is_fitted_exactly_and_its_quality_said():
    fit = fit_line({1: 5, 2: 7, 4: 11})
    assert (fit.slope, fit.intercept, fit.r_squared) == pytest.approx((2, 3, 1))
    assert fit.at(10) == pytest.approx(23)
    assert fit_line({1: 0, 2: 9, 3: 0}).r_squared == pytest.approx(0)
    assert fit_line({3: 8}).at(5) == 8
    assert fit_line({1: 4, 2: 4}).r_squared == 1
