"""Readouts that come and go while windows change: their parameter groups, their optimizer state, their checkpoints."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import Pipeline, build_pipeline
from mpc_dist.windows import Windows, backprop, forward_forward, tumbling
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


def decaying_but_vectors(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Vectors first, and no group without parameters."""
    vectors, others = ([p for p in parameters if (p.ndim == 1) == is_vector] for is_vector in (True, False))
    groups = [{"params": vectors, "weight_decay": 0.0, "lr": 0.2}, {"params": others, "weight_decay": 0.5}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)


def build_by_settings(optimizer, first: Windows | None = None) -> tuple[Pipeline, dict[int, nn.Module]]:
    """Two blocks and a last readout without biases, which an interior readout has."""
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    readouts = {1: nn.Linear(3, 3), 2: nn.Linear(3, 3, bias=False)}
    pipeline = build_pipeline(
        blocks, mean_squared_error, horizon=first or backprop(2), optimizer=optimizer, readouts=readouts
    )
    pipeline.step(torch.randn(2, 3), torch.randn(2, 3))
    return pipeline, readouts


def group_with(pipeline: Pipeline, parameter: nn.Parameter) -> dict[str, object]:
    groups = pipeline.stage.optimizer.param_groups
    (found,) = [group for group in groups if any(p is parameter for p in group["params"])]
    return found


def test_a_group_that_the_first_windows_did_not_need_joins_with_its_own_settings_and_the_rate_of_now():
    pipeline, readouts = build_by_settings(decaying_but_vectors)
    (group,) = pipeline.stage.optimizer.param_groups
    group["lr"] /= 4  # by hand, as a loop of one's own may
    pipeline.change_windows(forward_forward(2))
    first, second = pipeline.stage.optimizer.param_groups
    assert first is group
    assert (first["weight_decay"], first["lr"], len(first["params"])) == (0.5, 0.025, 4)
    assert (second["weight_decay"], second["lr"], len(second["params"])) == (0.0, 0.05, 1)
    assert group_with(pipeline, readouts[1].bias) is second
    assert group_with(pipeline, readouts[1].weight) is first
    pipeline.step(torch.randn(2, 3), torch.randn(2, 3))
    pipeline.change_windows(backprop(2))
    pipeline.change_windows(forward_forward(2))
    assert [len(group["params"]) for group in pipeline.stage.optimizer.param_groups] == [4, 1]


def test_a_group_of_new_parameters_is_the_one_with_the_same_settings_wherever_it_stands():
    def heads_apart(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Biases in groups of their own length, first; those of 4 have other settings than those of 3."""
        lengths = {3: 0.0, 4: 0.1, 5: 0.0}
        biases = {n: [p for p in parameters if p.ndim == 1 and len(p) == n] for n in lengths}
        groups = [{"params": own, "weight_decay": lengths[n]} for n, own in reversed(biases.items()) if own]
        return torch.optim.SGD([*groups, {"params": [p for p in parameters if p.ndim > 1]}], lr=0.1, weight_decay=0.5)

    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.Linear(4, 3)]
    readouts = {1: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False)), 2: nn.Linear(3, 3)}
    pipeline = build_pipeline(blocks, mean_squared_error, horizon=backprop(2), optimizer=heads_apart, readouts=readouts)
    pipeline.step(torch.randn(2, 3), torch.randn(2, 3))
    torch.optim.lr_scheduler.LambdaLR(pipeline.stage.optimizer, lambda _: 0.5)
    pipeline.change_windows(forward_forward(2))
    assert group_with(pipeline, readouts[1][0].bias) is group_with(pipeline, blocks[1].bias)
    assert [len(group["params"]) for group in pipeline.stage.optimizer.param_groups] == [1, 3, 5]


def test_a_new_group_that_a_schedule_would_not_move_is_refused():
    pipeline, _ = build_by_settings(decaying_but_vectors)
    torch.optim.lr_scheduler.LambdaLR(pipeline.stage.optimizer, lambda _: 0.5)
    with pytest.raises(ValueError, match="made for its 1 groups would not move the rate of another; let the optimizer"):
        pipeline.change_windows(forward_forward(2))


def test_a_group_that_was_made_without_parameters_takes_those_that_belong_to_it_under_a_schedule_too():
    def with_empty(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        vectors, others = ([p for p in parameters if (p.ndim == 1) == is_vector] for is_vector in (True, False))
        return torch.optim.SGD(
            [{"params": vectors, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}], lr=0.1
        )

    pipeline, readouts = build_by_settings(with_empty)
    schedule = torch.optim.lr_scheduler.StepLR(pipeline.stage.optimizer, step_size=1, gamma=0.5)
    pipeline.step(torch.randn(2, 3), torch.randn(2, 3))
    schedule.step()
    pipeline.change_windows(forward_forward(2))
    assert [len(group["params"]) for group in pipeline.stage.optimizer.param_groups] == [1, 4]
    assert group_with(pipeline, readouts[1].bias)["weight_decay"] == 0
    assert {group["lr"] for group in pipeline.stage.optimizer.param_groups} == {0.05}


def test_a_new_group_is_refused_if_nobody_can_tell_its_rate():
    def by_width(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[p for p in parameters if p.shape == shape] for shape in ((3, 3), (2, 3), (3,))]
        rates = (0.1, 0.2, 0.3)
        return torch.optim.SGD([{"params": g, "lr": rate} for g, rate in zip(groups, rates, strict=True) if g])

    torch.manual_seed(0)
    blocks = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    readouts = {1: nn.Linear(3, 2), 2: nn.Linear(3, 2, bias=False)}
    readouts[1].bias = nn.Parameter(torch.zeros(3))  # of a shape that no other has; it is never run
    pipeline = build_pipeline(blocks, mean_squared_error, horizon=backprop(2), optimizer=by_width, readouts=readouts)
    pipeline.step(torch.randn(2, 3), torch.randn(2, 2))
    pipeline.stage.optimizer.param_groups[0]["lr"] /= 2
    with pytest.raises(ValueError, match="have moved by different factors; let the optimizer"):
        pipeline.change_windows(forward_forward(2))


def test_parameters_that_several_groups_may_take_are_refused():
    def one_each(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)

    pipeline, _ = build_by_settings(one_each)
    with pytest.raises(ValueError, match="does not have: 3 of its groups are like it; let the optimizer"):
        pipeline.change_windows(forward_forward(2))
