"""Blocks that run again in backward: as if they had run once."""

import copy

import pytest
import torch
from torch import nn

from mpc_dist.models import Chain
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, cumulative, sliding, tumbling
from tests.examples import assert_same, build_example
from tests.runtime.reference import KeepGradients

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
