"""Readouts that come and go while windows change: their parameter groups, their optimizer state, their checkpoints."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import Pipeline, build_pipeline
from mpc_dist.windows import backprop, forward_forward, tumbling
from tests.examples import build_dense_chain
from tests.runtime.reference import reference_gradients

pytestmark = pytest.mark.usefixtures("float64")
T = 4


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As people set it: no decay on biases, and another rate."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.3, "lr": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def build(horizon, optimizer=grouped) -> tuple[Pipeline, nn.Module, Tensor, Tensor]:
    chain, inputs, labels = build_dense_chain([3, 4, 4, 4, 3])
    readouts = {int(s): readout for s, readout in chain.readouts.items()}
    pipeline = build_pipeline(
        list(chain.blocks), mean_squared_error, horizon=horizon, optimizer=optimizer, readouts=readouts
    )
    return pipeline, chain, inputs, labels


CHANGES = [backprop(T), forward_forward(T), tumbling(T, 2), forward_forward(T)]


def test_readouts_that_join_are_in_the_groups_that_they_would_have_had_from_the_start():
    pipeline, chain, inputs, labels = build(CHANGES[0])
    reference = copy.deepcopy(chain)
    named = dict(reference.named_parameters())
    update = grouped(list(named.values()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(update, 0.9)]
    pipeline.connect(inputs, labels)
    schedules.append(torch.optim.lr_scheduler.ExponentialLR(pipeline.stage.optimizer, 0.9))
    for number, windows in enumerate(CHANGES):
        if number:
            pipeline.change_windows(windows)
        for _ in range(3):
            update.zero_grad(set_to_none=True)
            for key, gradient in reference_gradients(reference, inputs, labels, windows, 1).items():
                named[key].grad = gradient
            update.step()
            pipeline.step(inputs, labels)
            for schedule in schedules:
                schedule.step()
    for key, parameter in chain.named_parameters():
        torch.testing.assert_close(parameter, named[key], rtol=1e-9, atol=1e-9, msg=key)


class Kept:
    """What `collect_state` gave, as a checkpoint that can be read."""

    num_replicas = 1

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.described = {name: tensor.to("meta") for name, tensor in tensors.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        for name, tensor in into.items():
            tensor.copy_(self._tensors[name])


def train(pipeline: Pipeline, inputs: Tensor, labels: Tensor, windows, num_steps: int) -> None:
    if windows is not None:
        pipeline.change_windows(windows)
    for _ in range(num_steps):
        pipeline.step(inputs, labels)


def test_a_saved_state_has_the_optimizer_state_of_readouts_out_of_use_and_is_restored_after_a_change():
    pipeline, chain, inputs, labels = build(forward_forward(T))
    train(pipeline, inputs, labels, None, 3)
    train(pipeline, inputs, labels, backprop(T), 2)
    saved = pipeline.collect_state()
    for key, parameter in chain.named_parameters():
        assert saved[f"optimizer.{key}.exp_avg"].shape == parameter.shape
    train(pipeline, inputs, labels, forward_forward(T), 3)
    expected = {key: value.detach().clone() for key, value in chain.named_parameters()}

    again, other, _, _ = build(forward_forward(T))
    train(again, inputs, labels, None, 1)
    train(again, inputs, labels, backprop(T), 1)
    again.restore_state(Kept(saved), step=5)
    train(again, inputs, labels, forward_forward(T), 3)
    for key, parameter in other.named_parameters():
        assert torch.equal(parameter, expected[key]), key

    # In a new process, which has never used those readouts: they are kept, too, and saved again.
    anew, last, _, _ = build(backprop(T))
    anew.connect(inputs, labels)
    assert anew.restore_state(Kept(saved), step=5) == []
    for key, value in anew.collect_state().items():
        assert torch.equal(value, saved[key]) or key.startswith("random."), key
    assert anew.collect_state().keys() == saved.keys()
    train(anew, inputs, labels, forward_forward(T), 3)
    for key, parameter in last.named_parameters():
        assert torch.equal(parameter, expected[key]), key


def test_a_group_that_the_optimizer_does_not_have_is_refused():
    def by_width(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[p for p in parameters if len(p) == width] for width in (3, 4, 5)]
        return torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)

    torch.manual_seed(0)
    blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    head = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    pipeline = build_pipeline(
        blocks, mean_squared_error, horizon=backprop(2), optimizer=by_width, readouts={1: head, 2: nn.Linear(3, 3)}
    )
    pipeline.step(torch.randn(2, 3), torch.randn(2, 3))
    with pytest.raises(ValueError, match="belong to a group that the optimizer does not have"):
        pipeline.change_windows(forward_forward(2))
