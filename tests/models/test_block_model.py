"""Chains: what they refuse, and that a part's weights depend on the seed and the part alone."""

import pytest
import torch
from torch import nn

from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.readout import mean_squared_error
from tests.examples import MODELS, TOKENS, draw_batch


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_part_do_not_depend_on_which_readouts_are_built(name):
    model, task = MODELS[name]
    everything = build_chain(model, task, seed=3).state_dict()
    few = build_chain(model, task, boundaries=[2], seed=3)
    assert few.boundaries == (2, model.num_blocks)
    for key, value in few.state_dict().items():
        assert torch.equal(value, everything[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_seeds_give_different_weights_and_leave_the_random_state_alone(name):
    model, task = MODELS[name]
    before = torch.get_rng_state()
    first, second = (build_chain(model, task, seed=seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [key for key in first.state_dict() if key.endswith(("linear.weight", "conv1.weight", "qkv.weight"))]
    assert weights
    assert not any(torch.equal(first.state_dict()[key], second.state_dict()[key]) for key in weights)


def test_blocks_of_one_model_differ_from_each_other():
    chain = build_chain(GPT(num_blocks=3, width=8, num_heads=2), TOKENS)
    assert not torch.equal(chain.blocks[1].expand.weight, chain.blocks[2].expand.weight)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_predicts_the_label_at_every_boundary(name):
    model, task = MODELS[name]
    chain = build_chain(model, task)
    state, labels = draw_batch(task)
    for boundary, block in enumerate(chain.blocks, start=1):
        state = block(state)
        assert chain.predict(boundary, state).shape[-1] == task.num_outputs
        assert chain.loss_at(boundary, state, labels).ndim == 0


def test_a_chain_of_plain_modules_reads_the_state_itself():
    chain = Chain([nn.Linear(3, 3), nn.Linear(3, 2)], mean_squared_error)
    inputs = torch.randn(4, 3)
    assert chain.boundaries == (1, 2)
    assert torch.equal(chain(inputs), chain.blocks[1](chain.blocks[0](inputs)))


def test_a_chain_refuses_shared_weights_missing_blocks_and_readouts_out_of_range():
    tied = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"blocks\.1\.weight is the same parameter as blocks\.0\.weight; .*untie them"):
        Chain([tied, tied], mean_squared_error)
    with pytest.raises(ValueError, match="at least 1 block"):
        Chain([], mean_squared_error)
    with pytest.raises(ValueError, match=r"readout boundary 2 is out of range; use 1\.\.1"):
        Chain([nn.Linear(3, 3)], mean_squared_error, {2: nn.Identity()})
