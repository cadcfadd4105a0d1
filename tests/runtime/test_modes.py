"""Modes of modules: evaluation leaves each as it was found, and training runs each in its own."""

import pytest
import torch
from torch import nn

from mpc_dist.models import Chain
from mpc_dist.readout import Shared, mean_squared_error
from mpc_dist.runtime import build_pipeline
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, sliding
from tests.runtime.reference import KeepGradients


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("is_whole_frozen", [False, True])
def test_what_a_user_froze_stays_frozen_over_an_evaluation(is_whole_frozen):
    given = blocks()
    (given[1] if is_whole_frozen else given[1][1]).eval()
    modes = [part.training for block in given for part in block.modules()]
    with build_pipeline(given, mean_squared_error, horizon=1, optimizer=sgd) as pipeline:
        pipeline.step(*batch())
        pipeline.evaluate(*batch())
        assert [part.training for block in given for part in block.modules()] == modes
        statistics = given[1][1].running_mean.clone()
        pipeline.step(*batch())
    assert torch.equal(given[1][1].running_mean, statistics)
    assert not torch.equal(given[0][1].running_mean, torch.zeros(4))


def test_an_evaluation_neither_drops_nor_moves_anything_and_training_drops_again_after_it():
    chain = Chain(blocks(), mean_squared_error)
    layout = lay_out(backprop(3), (1, 2))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, 2), optimizer=KeepGradients)
    inputs, labels = batch()
    before = {key: value.clone() for key, value in chain.state_dict().items()}
    score = pipeline.evaluate(inputs, labels)[3]
    assert all(torch.equal(value, before[key]) for key, value in chain.state_dict().items())
    chain.eval()
    with torch.no_grad():
        assert score.loss == pytest.approx(float(nn.functional.mse_loss(chain(inputs), labels)), rel=1e-6)
    chain.train()
    first = pipeline.evaluate(inputs, labels)[3].loss
    losses = [float(pipeline.step(inputs, labels)[-1].losses[layout.num_segments][0]) for _ in range(2)]
    assert first == score.loss
    assert losses[0] != losses[1]  # other features are dropped in each step


def test_a_shared_head_is_evaluated_in_evaluation_mode_and_trained_in_training_mode():
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    torch.manual_seed(0)
    chain = Chain([nn.Linear(4, 4) for _ in range(2)], mean_squared_error, {1: Shared(head), 2: head})
    layout = lay_out(sliding(2, 1), (1, 1))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, 1), optimizer=KeepGradients)
    inputs, labels = batch()
    scores = pipeline.evaluate(inputs, labels)
    with torch.no_grad():
        for boundary, state in ((1, chain.blocks[0](inputs)), (2, chain.blocks[1](chain.blocks[0](inputs)))):
            expected = nn.functional.mse_loss(head[1](state), labels)
            assert scores[boundary].loss == pytest.approx(float(expected), rel=1e-6)
    assert head.training
    assert head[0].training


def test_an_evaluation_that_fails_leaves_the_modes_too():
    given = blocks()
    with build_pipeline(given, mean_squared_error, horizon=1, optimizer=sgd) as pipeline:
        pipeline.step(*batch())
        with pytest.raises(ValueError, match="labels"):
            pipeline.evaluate(torch.randn(6, 4), torch.randn(6, 5))
    assert all(part.training for block in given for part in block.modules())


def test_a_first_evaluation_says_how_the_size_of_messages_is_learnt():
    blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    pipeline = build_pipeline(
        blocks, mean_squared_error, horizon=backprop(2), optimizer=KeepGradients, num_microbatches=2
    )
    inputs, labels = torch.randn(2, 8, 3)
    with pytest.raises(ValueError, match=r"5 samples are no 2 equal micro-batches.*call connect\(inputs, labels\)"):
        pipeline.evaluate(inputs[:5], labels[:5])
    pipeline.connect(inputs, labels)
    score = pipeline.evaluate(inputs[:5], labels[:5])[2]
    expected = mean_squared_error(blocks[1](blocks[0](inputs[:5])), labels[:5])
    assert score.loss == pytest.approx(float(expected.detach()), rel=1e-6)
