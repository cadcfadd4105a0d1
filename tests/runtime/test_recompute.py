"""Blocks that run again in backward: as if they had run once."""

import copy
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

from mpc_dist.models import Chain
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import build_pipeline
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.recompute import SMALL_BUFFER
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, cumulative, sliding, tumbling
from tests.examples import assert_same, build_example
from tests.runtime.reference import KeepGradients, reference_gradients

pytestmark = pytest.mark.usefixtures("float64")
ROUNDING = 1e-12


def gradients_after_a_step(chain: Chain, windows, partition, M: int, batch, *, split: bool, recompute: bool):
    layout = lay_out(windows, partition)
    pipeline = InProcessPipeline(
        chain,
        layout,
        build_schedule(layout, M, split=split),
        optimizer=KeepGradients,
        options=StageOptions(checkpoint=recompute),
    )
    pipeline.step(*batch)
    return {key: p.grad for key, p in chain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("windows", [sliding(6, 1), sliding(6, 3), tumbling(6, 3), cumulative(6, 2), backprop(6)])
def test_batch_norm_moves_its_statistics_once_for_each_micro_batch(windows, split):
    chain, inputs, labels = build_example("resnet_cifar")
    plain = copy.deepcopy(chain)
    found = gradients_after_a_step(chain, windows, (2, 1, 3), 2, (inputs, labels), split=split, recompute=True)
    expected = gradients_after_a_step(
        copy.deepcopy(plain), windows, (2, 1, 3), 2, (inputs, labels), split=split, recompute=False
    )
    assert_same(found, expected, tolerance=ROUNDING)
    with torch.no_grad():
        for part in inputs.chunk(2):  # by torch alone
            state = part
            for block in plain.blocks:
                state = block(state)
    for (name, buffer), wanted in zip(chain.blocks.named_buffers(), plain.blocks.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.parametrize("split", [False, True])
def test_a_forward_that_reads_what_it_moves_is_repeated_exactly(split):
    """Spectral norm iterates a vector in every forward and divides the weight by what it finds."""
    torch.manual_seed(0)
    blocks = [nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(4)]
    chain = Chain(blocks, mean_squared_error)
    plain = copy.deepcopy(chain)
    inputs, labels = torch.randn(2, 6, 4)
    found = gradients_after_a_step(chain, sliding(4, 2), (2, 2), 3, (inputs, labels), split=split, recompute=True)
    expected = gradients_after_a_step(plain, sliding(4, 2), (2, 2), 3, (inputs, labels), split=split, recompute=False)
    assert_same(found, expected, tolerance=ROUNDING)
    for buffer, wanted in zip(chain.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("place", [0, 1])
def test_a_block_that_modifies_its_input_is_refused_in_one_line(place):
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    blocks[place] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=rf"block {place} \(Sequential\) modifies its input in place") as caught:
        gradients_after_a_step(
            Chain(blocks, mean_squared_error),
            backprop(2),
            (2,),
            1,
            (torch.randn(2, 4), torch.randn(2, 4)),
            split=False,
            recompute=True,
        )
    assert "\n" not in str(caught.value)


def norms_without_bias(num_blocks: int) -> list[nn.Module]:
    """Of zeros, such a layer makes zeros: the mean of a batch does not move what batch norm keeps of it."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(num_blocks)]


def train_norms(rank: int, num_ranks: int, recompute: bool) -> dict[str, torch.Tensor]:
    torch.set_default_dtype(torch.float64)
    blocks = norms_without_bias(4)
    pipeline = Pipeline(
        build_mesh(Launch(rank, num_ranks, rank), num_stages=num_ranks, timeout=timedelta(seconds=60)),
        lay_out(backprop(4), [4 // num_ranks] * num_ranks),
        build_block=blocks.__getitem__,
        build_readout=lambda _: nn.Identity(),
        loss=mean_squared_error,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        num_microbatches=2,
        options=StageOptions(checkpoint=recompute),
    )
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        pipeline.step(*torch.randn(2, 6, 4, generator=generator))
    return {f"{name}.{key}": buffer for name, part in pipeline.modules.items() for key, buffer in part.named_buffers()}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_ranks_too_where_the_start_up_check_runs_on_zeros(num_ranks):
    blocks = norms_without_bias(4)
    generator = torch.Generator().manual_seed(5)
    update = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=0.1)
    for _ in range(3):  # by torch alone
        update.zero_grad()
        inputs, labels = torch.randn(2, 6, 4, generator=generator)
        for part, wanted in zip(inputs.chunk(2), labels.chunk(2), strict=True):
            state = part
            for block in blocks:
                state = block(state)
            (mean_squared_error(state, wanted) / 2).backward()
        update.step()
    expected = {f"blocks.{t}.{key}": buffer for t, block in enumerate(blocks) for key, buffer in block.named_buffers()}
    found = {}
    for own in run_local_ranks(train_norms, num_ranks, num_ranks, True):
        found |= own
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-10, msg=name)


def test_statistics_that_begin_to_move_later_move_once_too():
    blocks = norms_without_bias(2)
    pipeline = build_pipeline(
        blocks,
        mean_squared_error,
        horizon=backprop(2),
        optimizer=KeepGradients,
        num_microbatches=2,
        options=StageOptions(checkpoint=True),
    )
    for is_training, seen in ((False, 0), (True, 2)):
        for block in blocks:
            block.train(is_training)
        pipeline.step(*torch.randn(2, 6, 4))
        assert [int(block[1].num_batches_tracked) for block in blocks] == [seen, seen]


class Remembering(nn.Module):
    """Adds up what it has seen in a large buffer, from the second micro-batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(SMALL_BUFFER + 1))
        self.register_buffer("table", torch.ones(SMALL_BUFFER + 1))
        self.is_on = False

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            self.seen += 1
        return self.linear(state) * self.table[0]


def test_a_large_buffer_that_moves_is_noticed_and_one_that_does_not_is_not_copied():
    block = Remembering()
    options = StageOptions(checkpoint=True)
    pipeline = build_pipeline(
        [block], mean_squared_error, horizon=backprop(1), optimizer=KeepGradients, num_microbatches=2, options=options
    )
    pipeline.step(*torch.randn(2, 6, 4))
    block.is_on = True
    for step in (1, 2):
        pipeline.step(*torch.randn(2, 6, 4))
        assert block.seen[0] == 2 * step
    (segment,) = pipeline.stage.segments.values()
    assert segment._recomputer._still[0] == {"table"}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("windows", [sliding(4, 1), tumbling(4, 2), backprop(4)])
def test_a_block_runs_twice_for_each_micro_batch(windows, split):
    """Forward and once more on the way back, though that be in two halves."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(4)]
    runs = [0] * 4
    for t, block in enumerate(blocks):

        def count(*_: object, t: int = t) -> None:
            runs[t] += 1

        block[0].register_forward_pre_hook(count)
    batch = torch.randn(2, 6, 4)
    gradients_after_a_step(
        Chain(blocks, mean_squared_error), windows, (1, 2, 1), 3, tuple(batch), split=split, recompute=True
    )
    assert runs == [2 * 3] * 4


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_that_pass_their_input_on_train_whichever_way(split, recompute):
    torch.manual_seed(0)
    chain = Chain([nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4), nn.Identity()], mean_squared_error)
    inputs, labels = torch.randn(2, 6, 4)
    found = gradients_after_a_step(
        chain, sliding(4, 3), (1, 1, 2), 2, (inputs, labels), split=split, recompute=recompute
    )
    assert_same(found, reference_gradients(chain, inputs, labels, sliding(4, 3), 2), tolerance=ROUNDING)
