"""The decoder-only transformer."""

import pytest
import torch

from mpc_dist.models import GPT, build_chain
from tests.examples import IMAGES, TOKENS, draw_batch


def test_a_position_sees_only_itself_and_the_past():
    chain = build_chain(GPT(num_blocks=3, width=8, num_heads=2), TOKENS)
    tokens, _ = draw_batch(TOKENS)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % TOKENS.num_outputs
    before, after = chain(tokens), chain(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_position_matters():
    chain = build_chain(GPT(num_blocks=1, width=8, num_heads=2), TOKENS)
    tokens = torch.zeros(1, 7, dtype=torch.long)
    assert not torch.allclose(chain.blocks[0](tokens)[0, 0], chain.blocks[0](tokens)[0, 1])


def test_attention_equals_its_formula():
    attention = build_chain(GPT(num_blocks=2, width=6, num_heads=3), TOKENS).blocks[1].attention
    state = torch.randn(2, 5, 6)
    query, key, value = (part.view(2, 5, 3, 2).transpose(1, 2) for part in attention.qkv(state).chunk(3, dim=-1))
    scores = query @ key.transpose(-1, -2) / 2**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 6)
    torch.testing.assert_close(attention(state), attention.out(mixed))


def test_dropout_acts_in_training_only():
    chain = build_chain(GPT(num_blocks=2, width=8, num_heads=2, dropout=0.5), TOKENS)
    tokens, _ = draw_batch(TOKENS)
    assert not torch.equal(chain(tokens), chain(tokens))
    chain.eval()
    assert torch.equal(chain(tokens), chain(tokens))


def test_the_initial_loss_is_that_of_a_uniform_guess():
    chain = build_chain(GPT(num_blocks=8, width=64), TOKENS)
    tokens, labels = draw_batch(TOKENS, batch_size=64)
    expected = torch.log(torch.tensor(float(TOKENS.num_outputs)))
    torch.testing.assert_close(chain.loss(chain(tokens), labels), expected, rtol=0.02, atol=0)


def test_branches_are_scaled_down_with_the_depth():
    for depth in (2, 32):
        block = build_chain(GPT(num_blocks=depth, width=64), TOKENS, boundaries=[]).blocks[1]
        assert block.contract.weight.std().item() == pytest.approx(0.02 / (2 * depth) ** 0.5, rel=0.05)
        assert block.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_bad_sizes_and_data_are_refused():
    with pytest.raises(ValueError, match=r"model\.num_heads 3 must divide model\.width 8"):
        GPT(width=8, num_heads=3)
    with pytest.raises(ValueError, match=r"model\.dropout 1 is out of range"):
        GPT(dropout=1)
    with pytest.raises(ValueError, match=r"model\.dropout must be a finite number, got nan"):
        GPT(dropout=float("nan"))
    with pytest.raises(ValueError, match="gpt models tokens, but the data is classification; use data 'text'"):
        build_chain(GPT(), IMAGES)
