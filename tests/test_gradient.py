"""The oracle chain's first links: autograd = definition at h = T, formula by hand = definition, definition = sweep."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mpc_dist.gradient import eager_mpc_gradients, mpc_gradients
from mpc_dist.models import GPT, Chain, ResMLP, build_chain
from mpc_dist.readout import IGNORED, cross_entropy, mean_squared_error
from mpc_dist.windows import Windows, backprop, cumulative, forward_forward, loco, sliding, tumbling
from tests.examples import (
    MODELS,
    TOKENS,
    VECTORS,
    assert_same,
    backward_gradients,
    build_dense_chain,
    build_example,
    draw_batch,
)
from tests.test_windows import window_maps

pytestmark = pytest.mark.usefixtures("float64")

# Two orders of summation of a few dozen float64 terms of size about 1 differ by a few units in the 16th digit.
ROUNDING = 1e-12

READOUTS_OF = {name: ["local", "pool", "project"] for name in MODELS} | {
    "res_linear": ["identity", "pool", "project", "local", "shared"],
    "res_mlp": ["identity", "pool", "project", "local", "shared"],
    "gpt": ["local", "pool", "project", "shared"],
}
MODELS_AND_READOUTS = [(name, readout) for name, readouts in READOUTS_OF.items() for readout in readouts]


def states_of(model: Chain, inputs: Tensor) -> list[Tensor]:
    states = [inputs]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


@pytest.mark.parametrize(("name", "readout"), MODELS_AND_READOUTS)
def test_full_horizon_equals_backprop_bit_for_bit(name, readout):
    model, inputs, labels = build_example(name, readout=readout)
    actual = mpc_gradients(model, inputs, labels, backprop(model.num_blocks))
    expected = backward_gradients(model, model.loss(model(inputs), labels))
    assert_same(actual, expected)
    assert all(value.abs().sum() > 0 for key, value in actual.items() if "blocks" in key and "weight" in key)


@pytest.mark.parametrize(("name", "readout"), MODELS_AND_READOUTS)
def test_horizon_one_equals_the_gradient_of_each_blocks_own_local_loss(name, readout):
    model, inputs, labels = build_example(name, readout=readout)
    actual = mpc_gradients(model, inputs, labels, forward_forward(model.num_blocks))
    expected: dict[str, Tensor] = {}
    for t, state in enumerate(states_of(model, inputs)[:-1]):
        # A network of this block alone, with the readout at its output, on a constant input.
        alone = model.blocks[t](state.detach())
        local = backward_gradients(model, model.loss_at(t + 1, alone, labels))
        expected |= {key: v for key, v in local.items() if key.startswith((f"blocks.{t}.", f"readouts.{t + 1}."))}
    assert_same(actual, expected)


@pytest.mark.parametrize(("name", "readout"), MODELS_AND_READOUTS)
@pytest.mark.parametrize(
    "build", [lambda T: sliding(T, 2), lambda T: tumbling(T, 3), lambda T: cumulative(T, 3), loco, backprop]
)
def test_eager_sweep_equals_the_definition_on_every_model(name, readout, build):
    model, inputs, labels = build_example(name, readout=readout)
    windows = build(model.num_blocks)
    assert_same(
        eager_mpc_gradients(model, inputs, labels, windows),
        mpc_gradients(model, inputs, labels, windows),
        tolerance=ROUNDING,
    )


class PaperExample:
    """Appendix A: a residual MLP of 5 blocks x(t+1) = x(t) + relu(W(t) x(t) + b(t)) with L(x) = |x - y|^2 / 2.

    With D(t) = diag(relu'(W(t) x(t) + b(t))) and the Jacobian J(t) = I + D(t) W(t), each identity is

        p     = J(t+1)^T ... J(s-1)^T (x(s) - y),   s = min(t + h, 5)
        dL/dW(t) = D(t) p x(t)^T,    dL/db(t) = D(t) p
    """

    T = 5
    width = 4

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.weights = [torch.randn(self.width, self.width) / 2 for _ in range(self.T)]
        self.biases = [torch.randn(self.width) / 2 for _ in range(self.T)]
        self.x = torch.randn(self.width)
        self.y = torch.randn(self.width)

    def chain(self) -> Chain:
        family = ResMLP(num_blocks=self.T + 2, width=self.width)
        blocks = [family.build_block(t, VECTORS) for t in range(1, self.T + 1)]  # the interior layers are residual
        for block, weight, bias in zip(blocks, self.weights, self.biases, strict=True):
            block.linear.weight.data.copy_(weight)
            block.linear.bias.data.copy_(bias)
        return Chain(blocks, lambda prediction, labels: (prediction - labels).square().sum() / 2)

    def identity(self, h: int, t: int) -> tuple[Tensor, Tensor]:
        states, slopes = [self.x], []
        for W, b in zip(self.weights, self.biases, strict=True):
            slopes.append(((W @ states[-1] + b) > 0).double().diag())
            states.append(states[-1] + slopes[-1] @ (W @ states[-1] + b))
        s = min(t + h, self.T)
        p = states[s] - self.y
        for k in range(s - 1, t, -1):
            p = (torch.eye(self.width) + slopes[k] @ self.weights[k]).T @ p
        return torch.outer(slopes[t] @ p, states[t]), slopes[t] @ p


@pytest.mark.parametrize("t", range(5))
@pytest.mark.parametrize("h", [1, 3, 5])
def test_the_papers_five_block_example(h, t):
    example = PaperExample()
    gradients = mpc_gradients(example.chain(), example.x[None], example.y[None], sliding(5, h))
    weight, bias = example.identity(h, t)
    torch.testing.assert_close(gradients[f"blocks.{t}.linear.weight"], weight, rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(gradients[f"blocks.{t}.linear.bias"], bias, rtol=ROUNDING, atol=ROUNDING)


def test_loco_equals_its_formula():
    """g(u(t)) = dL(x(t+1)) + dL(x(t+2)); block 0 takes dL(x(2)) and the last dL(x(T))."""
    model, inputs, labels = build_dense_chain([3, 5, 4, 6, 5, 4])
    T = model.num_blocks
    states = states_of(model, inputs)
    losses = {s: model.loss_at(s, states[s], labels) for s in range(1, T + 1)}
    actual = mpc_gradients(model, inputs, labels, loco(T))
    for t in range(T):
        formula = losses[2] if t == 0 else losses[T] if t == T - 1 else losses[t + 1] + losses[t + 2]
        for name, parameter in model.blocks[t].named_parameters():
            (expected,) = torch.autograd.grad(formula, parameter, retain_graph=True)
            torch.testing.assert_close(actual[f"blocks.{t}.{name}"], expected, rtol=ROUNDING, atol=ROUNDING)


def test_cumulative_is_the_mean_of_the_losses_ahead():
    model, inputs, labels = build_dense_chain([3, 5, 4, 6])
    actual = mpc_gradients(model, inputs, labels, cumulative(3, 2))
    near, far = (mpc_gradients(model, inputs, labels, sliding(3, h)) for h in (1, 2))
    for name in (n for n in actual if n.startswith(("blocks.0", "blocks.1"))):
        torch.testing.assert_close(actual[name], (near[name] + far[name]) / 2, rtol=ROUNDING, atol=ROUNDING)


@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=9),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@settings(max_examples=60)
def test_eager_sweep_equals_the_definition_for_random_horizons_and_anchors(widths, seed, data):
    model, inputs, labels = build_dense_chain(widths, seed=seed)
    T = model.num_blocks
    anchors = data.draw(st.none() | st.sets(st.integers(1, T)).map(lambda chosen: sorted(chosen | {T})))
    windows = sliding(T, data.draw(st.integers(1, T)), anchors=anchors)
    assert_same(
        eager_mpc_gradients(model, inputs, labels, windows),
        mpc_gradients(model, inputs, labels, windows),
        tolerance=ROUNDING,
    )


@given(windows=window_maps(), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_eager_sweep_equals_the_definition_for_any_window_map(windows: Windows, seed):
    model, inputs, labels = build_dense_chain([3] + [4] * windows.num_blocks, seed=seed)
    assert_same(
        eager_mpc_gradients(model, inputs, labels, windows),
        mpc_gradients(model, inputs, labels, windows),
        tolerance=ROUNDING,
    )


def test_dropout_draws_the_same_numbers_in_the_sweep_and_in_the_definition():
    model = build_chain(GPT(num_blocks=4, width=8, num_heads=2, dropout=0.3), TOKENS)
    inputs, labels = draw_batch(TOKENS)
    results = []
    for compute in (mpc_gradients, eager_mpc_gradients):
        torch.manual_seed(5)
        results.append(compute(model, inputs, labels, sliding(4, 2)))
    assert_same(*results, tolerance=ROUNDING)


def test_batch_norm_statistics_move_once_per_call():
    expected, inputs, _ = build_example("resnet_cifar")
    states_of(expected, inputs)
    for compute in (mpc_gradients, eager_mpc_gradients):
        model, inputs, labels = build_example("resnet_cifar")
        compute(model, inputs, labels, sliding(model.num_blocks, 3))
        for (name, buffer), (_, wanted) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
            assert torch.equal(buffer, wanted), name


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_a_readouts_own_weights_learn_from_their_own_loss_only(compute):
    model, inputs, labels = build_dense_chain([3, 4, 5, 4])
    states = states_of(model, inputs)
    gradients = compute(model, inputs, labels, cumulative(3, 2))  # block losses weighted by 1/2, readouts' not
    for s in (1, 2, 3):
        expected = torch.autograd.grad(model.loss_at(s, states[s], labels), model.readouts[str(s)].weight)[0]
        torch.testing.assert_close(gradients[f"readouts.{s}.weight"], expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_frozen_parameters_and_unread_readouts_have_no_gradient(compute):
    model, inputs, labels = build_dense_chain([3, 4, 5, 4])
    model.blocks[1].requires_grad_(False)
    gradients = compute(model, inputs, labels, backprop(3))
    assert {name.rsplit(".", 2)[0] for name in gradients} == {"blocks.0", "blocks.2", "readouts"}
    assert {name for name in gradients if name.startswith("readouts")} == {"readouts.3.weight", "readouts.3.bias"}


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_a_parameter_that_the_loss_does_not_reach_has_gradient_zero(compute):
    class WithUnused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.unused = nn.Parameter(torch.ones(2))

    model = Chain([WithUnused(), nn.Linear(3, 3)], mean_squared_error)
    gradients = compute(model, torch.randn(2, 3), torch.randn(2, 3), sliding(2, 1))
    assert torch.equal(gradients["blocks.0.unused"], torch.zeros(2))


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_a_block_with_nothing_that_the_loss_reaches_has_gradient_zero(compute):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, state: Tensor) -> Tensor:
            return state.detach() + 1

    model = Chain([Constant(), nn.Linear(3, 3)], mean_squared_error)
    gradients = compute(model, torch.randn(2, 3), torch.randn(2, 3), sliding(2, 1))
    assert torch.equal(gradients["blocks.0.unused"], torch.zeros(2))
    assert gradients["blocks.1.weight"].abs().sum() > 0


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
@pytest.mark.parametrize("position", [0, 1])
def test_a_block_that_modifies_its_input_is_refused(compute, position):
    blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    blocks[position] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
    model = Chain(blocks, mean_squared_error)
    with pytest.raises(ValueError, match=r"block \d \(Sequential\) modifies its input in place"):
        compute(model, torch.randn(2, 3), torch.randn(2, 3), sliding(2, 1))


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_windows_that_do_not_fit_the_model_are_refused(compute):
    model, inputs, labels = build_dense_chain([3, 4, 5, 4])
    with pytest.raises(ValueError, match="cover 4 blocks but the model has 3; build them with num_blocks=3"):
        compute(model, inputs, labels, backprop(4))
    del model.readouts["1"]
    with pytest.raises(ValueError, match=r"aim at boundaries \[1\], which have no readout; .* \[2, 3\]"):
        compute(model, inputs, labels, forward_forward(3))


@pytest.mark.parametrize("compute", [mpc_gradients, eager_mpc_gradients])
def test_labels_of_which_none_counts_teach_nothing(compute):
    model = build_chain(GPT(num_blocks=2, width=8, num_heads=2), TOKENS)
    tokens, labels = draw_batch(TOKENS)
    gradients = compute(model, tokens, torch.full_like(labels, -100), sliding(2, 1))
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.mark.usefixtures("float64")
def test_a_batch_without_a_label_that_counts_has_zero_gradients():
    parts, inputs, _ = build_dense_chain([3, 4, 5])
    chain = Chain(list(parts.blocks), cross_entropy, {s: parts.readouts[str(s)] for s in (1, 2)})
    labels = torch.full((len(inputs),), IGNORED)
    for found in (mpc_gradients, eager_mpc_gradients):
        gradients = found(chain, inputs, labels, sliding(2, 1))
        assert set(gradients) == {name for name, _ in chain.named_parameters()}
        assert all(not value.any() for value in gradients.values())  # a number that is none would count
