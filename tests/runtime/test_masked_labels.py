"""Labels with holes: however a batch is cut into micro-batches and over replicas, it learns as one big batch."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.readout import count_labels, cross_entropy
from mpc_dist.runtime import build_pipeline
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, cumulative, loco, sliding, tumbling
from tests.examples import TOKENS, assert_same
from tests.runtime.reference import KeepGradients
from tests.runtime.test_distributed import connect

pytestmark = pytest.mark.usefixtures("float64")
T, IGNORED, ROUNDING = 5, -100, 1e-12
WINDOWS = {
    "h = 1": sliding(T, 1),
    "h = 2": sliding(T, 2),
    "h = 3": sliding(T, 3),
    "tumbling 2": tumbling(T, 2),
    "cumulative 3": cumulative(T, 3),
    "loco": loco(T),
    "backprop": backprop(T),
}


def build() -> Chain:
    return build_chain(GPT(num_blocks=T, width=8, num_heads=2), TOKENS)


def draw_masked(batch_size: int) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which few count, most of them in a few samples; in the first sixth, none."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, TOKENS.num_outputs, (2, batch_size, *TOKENS.input_shape), generator=generator)
    keep = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 1, batch_size)[:, None] ** 2
    keep[: batch_size // 6] = False
    return tokens, torch.where(keep, labels, IGNORED)


def plain_loss(chain: Chain, tokens: Tensor, labels: Tensor) -> Tensor:
    """By torch alone, of the whole batch at once."""
    state = tokens
    for block in chain.blocks:
        state = block(state)
    logits = chain.readouts[str(T)](state)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("M", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("split", [False, True])
def test_micro_batches_equal_one_big_batch(name, M, split):
    chain = build()
    tokens, labels = draw_masked(60)
    layout = lay_out(WINDOWS[name], (2, 1, 2))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, M, split=split), optimizer=KeepGradients)
    pipeline.step(tokens, labels)
    found = {key: p.grad for key, p in chain.named_parameters() if p.grad is not None}
    assert_same(found, mpc_gradients(chain, tokens, labels, WINDOWS[name]), tolerance=ROUNDING)


def train_replica(rank: int, partition: tuple[int, ...], names: list[str], M: int) -> list[tuple[dict, dict, float]]:
    torch.set_default_dtype(torch.float64)
    tokens, labels = draw_masked(60)
    results = []
    for name in names:
        chain = build()
        pipeline = connect(
            rank, partition, WINDOWS[name], chain, optimizer=KeepGradients, num_microbatches=M, replicas=2
        )
        # Of the first replica's samples few have labels at all.
        part = slice(30) if pipeline.mesh.replica == 0 else slice(30, None)
        result = pipeline.step(tokens[part], labels[part])
        pipeline.close()
        found = {key: p.grad for key, p in pipeline.named_parameters().items() if p.grad is not None}
        results.append((found, result.losses, result.count))
    return results


@pytest.mark.parametrize("M", [1, 2, 5])
def test_replicas_equal_one_big_batch(M):
    tokens, labels = draw_masked(60)
    names = ["h = 1", "h = 2", "tumbling 2", "cumulative 3", "backprop"]
    by_rank = run_local_ranks(train_replica, 4, (2, 3), names, M)
    for index, name in enumerate(names):
        chain = build()
        expected = mpc_gradients(chain, tokens, labels, WINDOWS[name])
        for rank in range(4):
            found = by_rank[rank][index][0]
            assert_same(found, {key: expected[key] for key in found}, tolerance=ROUNDING)
        assert {key for rank in by_rank for key in rank[index][0]} == set(expected)
        # What each replica logs is the mean over its own labels that count; together they give the whole batch's.
        parts = [by_rank[rank][index][1:] for rank in (2, 3)]
        total = sum(losses[T] * count for losses, count in parts)
        assert sum(count for _, count in parts) == int((labels != IGNORED).sum())
        assert total / sum(count for _, count in parts) == pytest.approx(
            float(plain_loss(chain, tokens, labels).detach())
        )


@pytest.mark.parametrize("M", [1, 2, 3])
def test_losses_and_scores_are_those_of_plain_torch(M):
    chain = build()
    tokens, labels = draw_masked(12)
    layout = lay_out(backprop(T), (2, 3))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, M), optimizer=KeepGradients)
    expected = plain_loss(chain, tokens, labels).detach()
    record = pipeline.step(tokens, labels)[-1]
    counts, losses = (by_boundary[layout.num_segments] for by_boundary in (record.counts, record.losses))
    total = sum(float(loss) * count for loss, count in zip(losses, counts, strict=True))
    assert total / sum(counts) == pytest.approx(float(expected), rel=ROUNDING)
    score = pipeline.evaluate(tokens, labels)[T]
    assert score.loss == pytest.approx(float(expected), rel=ROUNDING)
    right = chain(tokens).argmax(-1) == labels
    assert score.accuracy == float(right.sum() / (labels != IGNORED).sum())


@pytest.mark.parametrize("split", [False, True])
def test_a_step_without_any_label_learns_nothing_and_breaks_nothing(split):
    chain = build()
    tokens, labels = draw_masked(6)
    layout = lay_out(sliding(T, 2), (2, 3))
    pipeline = InProcessPipeline(chain, layout, build_schedule(layout, 2, split=split), optimizer=KeepGradients)
    pipeline.step(tokens, torch.full_like(labels, IGNORED))
    # Zeros, as the oracle's, not none: momentum and decay go on alike for all weights.
    read = {f"readouts.{s}." for s in layout.windows.readouts}
    for name, parameter in chain.named_parameters():
        if name.startswith("blocks.") or any(map(name.startswith, read)):
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
    assert pipeline.evaluate(tokens, torch.full_like(labels, IGNORED))[T].accuracy is None


class Rows(nn.Module):
    """Logits (N, classes) of vectors, for torch's own losses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, state: Tensor) -> Tensor:
        return self.linear(state)


class OnlyLarge:
    """A loss of one's own that says how many labels it is the mean of."""

    def __call__(self, prediction: Tensor, labels: Tensor) -> Tensor:
        kept = labels.abs() > 1
        return (prediction - labels)[kept].square().sum() / kept.sum()

    def count(self, labels: Tensor) -> Tensor:
        return (labels.abs() > 1).sum()


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), torch.tensor([0, 0, 1, 3, 0, 2, 1, 1])),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.5, 1.0])), torch.tensor([0, 0, 1, 3, 0, 2, 1, -100])),
        (OnlyLarge(), torch.tensor([0.1, 2.0, 3.0, 0.2, 0.3, -4.0, 2.0, 2.5])[:, None].expand(8, 4).contiguous()),
        (partial(F.cross_entropy, ignore_index=0), torch.tensor([0, 0, 1, 3, 0, 2, 1, 1])),
        (partial(F.cross_entropy, weight=torch.tensor([0.1, 2.0, 0.5, 1.0])), torch.tensor([0, 0, 1, 3, 0, 2, 1, 1])),
        (nn.MultiMarginLoss(weight=torch.tensor([0.1, 2.0, 0.5, 1.0])), torch.tensor([0, 0, 1, 3, 0, 2, 1, 1])),
    ],
    ids=["another mark", "class weights", "its own count", "partial mark", "partial weights", "weights without a mean"],
)
def test_a_loss_of_ones_own_is_weighed_by_what_it_counts(loss, labels):
    torch.manual_seed(0)
    chain = Chain([nn.Linear(3, 3), nn.Linear(3, 3)], loss, {1: Rows(), 2: Rows()})
    inputs = torch.randn(8, 3)
    if isinstance(loss, nn.Module):
        loss.to(inputs.dtype)
    elif isinstance(loss, partial) and "weight" in loss.keywords:
        loss.keywords["weight"] = loss.keywords["weight"].to(inputs.dtype)
    plain = copy.deepcopy(chain)
    loss(plain(inputs), labels).backward()
    layout = lay_out(backprop(2), (1, 1))
    InProcessPipeline(chain, layout, build_schedule(layout, 4), optimizer=KeepGradients).step(inputs, labels)
    for (key, parameter), wanted in zip(chain.named_parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted.grad, rtol=ROUNDING, atol=ROUNDING, msg=key)


class Wrapped(nn.Module):
    """A loss whose mark nobody can see from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.inner(prediction, labels)


def test_a_loss_that_divides_by_something_else_is_refused_until_it_says_by_what():
    labels = torch.tensor([0, 0, 1, 3, 0, 2, 1, 1])
    loss = Wrapped()
    pipeline = build_pipeline([nn.Linear(3, 4)], loss, horizon=backprop(1), optimizer=KeepGradients, num_microbatches=2)
    with pytest.raises(ValueError, match=r"not the mean over the labels .* give it a method count\(labels\)"):
        pipeline.connect(torch.randn(8, 3), labels)
    loss.count = lambda labels: (labels != 0).sum()
    assert loss.count(labels) == 5
    pipeline.step(torch.randn(8, 3), labels)
    # Which labels it passes over is still not known: no accuracy rather than a wrong one.
    assert pipeline.evaluate(torch.randn(8, 3), labels)[1].accuracy is None
    loss.ignore_index = 0
    assert pipeline.evaluate(torch.randn(8, 3), labels)[1].accuracy is not None


def test_a_first_micro_batch_without_labels_is_no_reason_to_refuse_a_loss():
    def of_what_is_there(prediction: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(prediction, labels) if bool((labels != IGNORED).any()) else torch.zeros(())

    labels = torch.tensor([IGNORED, IGNORED, 1, 3])
    pipeline = build_pipeline(
        [nn.Linear(3, 4)], of_what_is_there, horizon=backprop(1), optimizer=KeepGradients, num_microbatches=2
    )
    assert pipeline.step(torch.randn(4, 3), labels).count == 2


def test_a_readouts_statistics_move_with_every_micro_batch_whether_or_not_labels_count():
    labels = torch.tensor([IGNORED, IGNORED, 1, 3])
    readout = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
    pipeline = build_pipeline(
        [nn.Linear(3, 3)],
        cross_entropy,
        horizon=backprop(1),
        optimizer=KeepGradients,
        num_microbatches=2,
        readouts={1: readout},
    )
    pipeline.step(torch.randn(4, 3), labels)
    assert readout[0].num_batches_tracked == 2


@pytest.mark.parametrize("size", [(4, 4), (5, 6)])
def test_the_accuracy_of_pictures_is_torchs(size):
    """torch's losses have the classes second, ours last."""
    torch.manual_seed(0)
    block, inputs, labels = nn.Conv2d(2, 4, 1), torch.randn(3, 2, *size), torch.randint(0, 4, (3, *size))
    pipeline = build_pipeline([block], nn.CrossEntropyLoss(), horizon=backprop(1), optimizer=KeepGradients)
    score = pipeline.evaluate(inputs, labels)[1]
    assert score.accuracy == float((block(inputs).argmax(1) == labels).double().mean())


def test_a_loss_that_is_no_mean_is_refused():
    for loss in (nn.CrossEntropyLoss(reduction="sum"), partial(F.cross_entropy, reduction="sum")):
        with pytest.raises(ValueError, match="reduction 'sum'; use 'mean'"):
            Chain([nn.Linear(2, 2)], loss)
    chain = Chain([nn.Linear(2, 2)], lambda prediction, labels: (prediction - labels).square())
    with pytest.raises(ValueError, match=r"the loss gives shape \(4, 2\); it must be a scalar"):
        mpc_gradients(chain, torch.randn(4, 2), torch.randn(4, 2), backprop(1))


def test_labels_are_counted_as_the_loss_counts_them():
    assert count_labels(cross_entropy, torch.tensor([[1, IGNORED], [IGNORED, 0]])) == 2
    assert count_labels(cross_entropy, torch.tensor([IGNORED])) == 0
    assert count_labels(F.mse_loss, torch.zeros(3, 2)) == 6
