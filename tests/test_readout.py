"""Readouts and losses: what each predicts, and who learns from it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import ResLinear, ResNetCifar, build_chain, build_parts
from mpc_dist.readout import (
    IGNORED,
    LinearHead,
    ReadoutConfig,
    Shared,
    check_mean,
    cross_entropy,
    features,
    mean_squared_error,
    pool,
    project,
)
from mpc_dist.windows import backprop, sliding
from tests.examples import IMAGES, MODELS, TOKENS, VECTORS, assert_same, build_example


def test_pool_averages_neighbouring_features_down_to_the_label():
    state = torch.arange(12.0).view(2, 6)
    expected = torch.tensor([[0.5, 2.5, 4.5], [6.5, 8.5, 10.5]])
    torch.testing.assert_close(pool(6, 3)(state), expected)


@pytest.mark.parametrize(("width", "num_outputs"), [(10, 4), (4, 10), (7, 7), (5, 1)])
def test_pool_is_torchs_adaptive_average_pooling(width, num_outputs):
    state = torch.randn(2, 3, width)
    torch.testing.assert_close(pool(width, num_outputs)(state), F.adaptive_avg_pool1d(state, num_outputs))


def test_images_are_averaged_over_space_and_other_states_left_alone():
    images, tokens = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 4)
    torch.testing.assert_close(features(images), images.flatten(2).mean(-1))
    assert features(tokens) is tokens
    assert pool(4, 2)(images).shape == (2, 2)


def test_a_projection_is_fixed_by_its_seed_whatever_the_dtype_and_random_state():
    first = project(8, 3, seed=4).matrix
    torch.manual_seed(99)
    assert torch.equal(project(8, 3, seed=4).matrix, first)
    assert not torch.equal(project(8, 3, seed=5).matrix, first)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(project(8, 3, seed=4).matrix, first.double())
    finally:
        torch.set_default_dtype(torch.float32)
    assert not list(project(8, 3, seed=4).parameters())


def test_a_shared_readout_predicts_as_the_head_but_teaches_only_the_state():
    head = LinearHead(4, 3, norm=True)
    state = torch.randn(2, 4, requires_grad=True)
    prediction = Shared(head)(state)
    assert torch.equal(prediction, head(state))
    prediction.sum().backward()
    assert state.grad is not None
    assert all(parameter.grad is None for parameter in head.parameters())
    assert not list(Shared(head).parameters())


def test_the_shared_head_follows_the_final_heads_weights():
    head = LinearHead(4, 3)
    readout, state = Shared(head), torch.randn(2, 4)
    with torch.no_grad():
        head.linear.weight.mul_(2)
    assert torch.equal(readout(state), head(state))


@pytest.mark.usefixtures("float64")
def test_with_shared_readouts_the_head_learns_from_the_last_loss_only():
    model, inputs, labels = build_example("gpt", readout="shared")
    T = model.num_blocks
    windows = {h: mpc_gradients(model, inputs, labels, w) for h, w in ((1, sliding(T, 1)), (T, backprop(T)))}
    heads = [{k: v for k, v in g.items() if k.startswith("readouts")} for g in windows.values()]
    assert set(heads[0]) == {f"readouts.{T}.{name}" for name in ("norm.weight", "norm.bias", "linear.weight")}
    assert_same(*heads)


def test_token_cross_entropy_is_the_mean_over_all_positions():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    by_hand = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, labels), by_hand)
    torch.testing.assert_close(cross_entropy(logits[:, 0], labels[:, 0]), F.cross_entropy(logits[:, 0], labels[:, 0]))


def test_losses_refuse_shapes_that_would_broadcast_silently():
    with pytest.raises(ValueError, match=r"predicts shape \(4, 1\) but the labels have \(4, 3\); use a readout"):
        mean_squared_error(torch.zeros(4, 1), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"labels need \(4, 2\), but they have \(4,\)"):
        cross_entropy(torch.zeros(4, 2, 3), torch.zeros(4, dtype=torch.long))


def test_the_last_boundary_has_the_models_own_head_whatever_the_kind():
    for kind in ("pool", "project", "local"):
        assert isinstance(build_example("gpt", readout=kind)[0].readouts["5"], LinearHead)


def test_readouts_that_cannot_fit_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="identity readout at boundary 1 gives 6 features, but the task has 5 outputs"):
        build_chain(ResLinear(num_blocks=3, width=6), IMAGES, readout="identity")
    with pytest.raises(ValueError, match="boundary 1 has 4 features, but the final head reads 16; use local or pool"):
        build_chain(ResNetCifar(blocks_per_group=1, channels=4), IMAGES, readout="shared")
    late = build_chain(ResNetCifar(blocks_per_group=2, channels=4), IMAGES, readout="shared", boundaries=[5])
    assert late.boundaries == (5, 6)


def test_tokens_and_vectors_have_their_losses():
    assert build_chain(ResLinear(num_blocks=2, width=6), VECTORS).loss is mean_squared_error
    assert build_example("gpt")[0].loss is cross_entropy
    assert TOKENS.kind == "tokens"


@pytest.mark.parametrize("name", ["gpt", "resnet_cifar", "res_mlp"])
def test_a_local_heads_norm_and_depth_are_as_configured_and_the_last_head_is_the_models_own(name):
    model, task = MODELS[name]
    plain, inputs, _ = build_example(name)
    shaped = build_chain(model, task, readout=ReadoutConfig("local", norm=True, depth=3))
    bare = build_chain(model, task, readout=ReadoutConfig("local", norm=False))
    kinds = [type(module) for module in shaped.readouts["1"].linear]
    assert kinds == [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert not any(isinstance(module, nn.LayerNorm) for module in bare.readouts["1"].modules())
    state = shaped.blocks[0](inputs)
    assert shaped.predict(1, state).shape == plain.predict(1, state).shape
    last = str(model.num_blocks)
    assert str(shaped.readouts[last]) == str(plain.readouts[last])
    assert_same(dict(shaped.readouts[last].named_parameters()), dict(plain.readouts[last].named_parameters()))


def test_a_norm_moved_behind_the_pooling_predicts_as_before():
    model, task = MODELS["gpt"]
    own, _, _ = build_example("gpt")
    shaped = build_chain(model, task, readout=ReadoutConfig("local", norm=True))
    state = torch.randn(2, 7, 8)
    torch.testing.assert_close(shaped.predict(2, state), own.predict(2, state))


def test_a_part_built_alone_has_the_head_of_the_whole():
    model, task = MODELS["gpt"]
    config = ReadoutConfig("local", norm=True, depth=2)
    alone = build_parts(model, task, readout=config, seed=4).readout(3)
    whole = build_chain(model, task, readout=config, seed=4).readouts["3"]
    assert_same(dict(alone.named_parameters()), dict(whole.named_parameters()))


def test_the_shape_of_a_head_is_refused_for_other_kinds_and_out_of_range():
    with pytest.raises(ValueError, match=r"readout\.kind is shared; use local"):
        ReadoutConfig("shared", norm=True)
    with pytest.raises(ValueError, match=r"readout\.kind is pool; use local"):
        ReadoutConfig("pool", depth=2)
    with pytest.raises(ValueError, match=r"readout\.depth 0 is out of range; use 1\.\.4"):
        ReadoutConfig(depth=0)


def test_a_readout_at_its_defaults_is_identified_as_before_heads_had_a_shape():
    assert ReadoutConfig().identify() == {"kind": "local"}
    assert ReadoutConfig(norm=False, depth=2).identify() == {"kind": "local", "norm": False, "depth": 2}


def test_a_mean_over_unequal_halves_is_one_and_another_divisor_is_not():
    prediction, labels = torch.randn(4, 3), torch.tensor([0, IGNORED, 2, 1])
    check_mean(cross_entropy, prediction, labels)
    check_mean(torch.nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 5.0])), prediction, labels)
    with pytest.raises(ValueError, match="not the mean over the labels"):
        check_mean(lambda p, y: cross_entropy(p, y) * (y != IGNORED).sum() / len(y), prediction, labels)
