"""The paper's fully connected nets."""

import pytest
import torch

from mpc_dist.models import ResLinear, ResMLP, build_chain
from mpc_dist.task import Task
from tests.examples import IMAGES, TOKENS

TASK = Task("regression", (1,), 4)


def test_layers_are_residual_but_for_the_first_and_the_last():
    chain = build_chain(ResMLP(num_blocks=15, width=10), TASK, readout="pool")
    assert chain.num_blocks == 15
    assert [block.residual for block in chain.blocks] == [False] + [True] * 13 + [False]
    assert [tuple(block.linear.weight.shape) for block in chain.blocks] == [(10, 1)] + [(10, 10)] * 13 + [(4, 10)]


@pytest.mark.usefixtures("float64")
def test_the_linear_net_is_linear_and_has_no_bias():
    chain = build_chain(ResLinear(), TASK, readout="pool")
    x, y = torch.randn(2, 5, 1)
    torch.testing.assert_close(chain(x + 2 * y), chain(x) + 2 * chain(y))
    assert all(block.linear.bias is None for block in chain.blocks)


def test_the_mlp_has_bias_and_relu_but_no_relu_on_its_prediction():
    chain = build_chain(ResMLP(), TASK, readout="pool")
    assert all(block.linear.bias is not None for block in chain.blocks)
    x = torch.randn(7, 10)
    layer = chain.blocks[3]
    torch.testing.assert_close(layer(x), x + torch.relu(layer.linear(x)))
    assert (chain.blocks[0](torch.randn(50, 1)) >= 0).all()
    assert (chain.blocks[-1](torch.randn(50, 10)) < 0).any()


def test_weights_are_glorot_and_biases_zero():
    layer = build_chain(ResMLP(num_blocks=3, width=200), TASK, readout="pool").blocks[1].linear
    bound = (6 / (200 + 200)) ** 0.5
    assert bound * 0.99 < layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not layer.bias.any()


def test_images_are_flattened_and_tokens_refused():
    assert build_chain(ResMLP(num_blocks=3), IMAGES)(torch.randn(2, *IMAGES.input_shape)).shape == (2, 5)
    with pytest.raises(ValueError, match="takes real vectors, but the data gives tokens; use model 'gpt'"):
        build_chain(ResMLP(), TOKENS)


@pytest.mark.parametrize(("field", "value"), [("num_blocks", 0), ("width", -1), ("width", 2.5)])
def test_bad_sizes_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"model\.{field} .*{value}.*; use 1\.\."):
        ResMLP(**{field: value})
