"""Every precision: the definition with the same casts, plain torch, weights cast once, losses in float32."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.precision import Precision, set_tf32
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import build_pipeline
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.loss_scale import LossScale
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import Stage, StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import Windows, backprop, cumulative, sliding, tumbling
from tests.examples import TOKENS, assert_same, draw_batch
from tests.runtime.reference import KeepGradients, reference_gradients

HALF = Precision(torch.bfloat16)
SCALE = 2.0**10
TYPES = {
    "bfloat16": StageOptions(precision=HALF),
    "float16": StageOptions(precision=Precision(torch.float16), loss_scale=LossScale(SCALE)),
    "bfloat16 weights": StageOptions(precision=Precision(weights=torch.bfloat16)),
}
T = 4
WINDOWS = {
    "h = 1": sliding(T, 1),
    "tumbling 2": tumbling(T, 2),
    "sliding 2": sliding(T, 2),
    "backprop": backprop(T),
    "cumulative 2": cumulative(T, 2),
}


def build(options: StageOptions, *, seed: int = 0) -> Chain:
    chain = build_chain(GPT(num_blocks=T, width=16, num_heads=2), TOKENS, readout="local", seed=seed)
    return chain.to(options.precision.weights)


def start(chain: Chain, windows: Windows, partition, M: int, options: StageOptions, *, split=False, optimizer=None):
    layout = lay_out(windows, partition)
    return InProcessPipeline(
        chain, layout, build_schedule(layout, M, split=split), optimizer=optimizer or KeepGradients, options=options
    )


def keep_sums(self: Stage, factor: float) -> None:
    """In the update's place: the gradients as they were summed."""
    for parameter in self.parameters:
        if parameter.grad is not None:
            parameter.grad *= factor


def gradients_of(chain: Chain) -> dict[str, Tensor]:
    return {name: p.grad for name, p in chain.named_parameters() if p.grad is not None}


def expected_gradients(
    windows: Windows, partition: tuple[int, ...], M: int, options: StageOptions, num_replicas: int = 1
) -> dict[str, Tensor]:
    ends = [sum(partition[: rank + 1]) for rank in range(len(partition) - 1)]
    scale = 1.0 if options.loss_scale is None else SCALE * num_replicas  # each averages over its own labels
    chain, batch = build(options), draw_batch(TOKENS, batch_size=4)
    return reference_gradients(chain, *batch, windows, M, precision=options.precision, sent_at=ends, scale=scale)


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], *, is_same_order: bool) -> None:
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    if is_same_order:
        assert_same(found, expected)
        return
    # Cumulative windows add adjoints of several losses before or after they are rounded: to 8 bits at least.
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 2**-6 * value.norm(), name
    assert set(found) == set(expected)


@pytest.mark.parametrize(("M", "partition"), [(1, (1, 2, 1)), (2, (2, 2)), (4, (1, 2, 1))])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", WINDOWS)
def test_the_pipeline_equals_the_definition_with_the_same_casts(name, kind, M, partition, monkeypatch):
    monkeypatch.setattr(Stage, "_step", keep_sums)
    options, windows = TYPES[kind], WINDOWS[name]
    expected = expected_gradients(windows, partition, M, options)
    for split in (False, True):
        chain = build(options)
        start(chain, windows, partition, M, options, split=split).step(*draw_batch(TOKENS, batch_size=4))
        check_gradients(gradients_of(chain), expected, is_same_order=not name.startswith("cumulative"))


def sum_on_rank(rank: int, partition: tuple[int, ...], M: int, num_replicas: int) -> dict[str, dict[str, Tensor]]:
    """The gradients of one step in every precision, and the types that travelled."""
    Stage._step = keep_sums  # type: ignore[method-assign]
    mesh = build_mesh(
        Launch(rank, len(partition) * num_replicas, rank),
        num_stages=len(partition),
        num_replicas=num_replicas,
        timeout=timedelta(seconds=60),
    )
    found = {}
    for kind, options in TYPES.items():
        chain = build(options)
        pipeline = Pipeline(
            mesh,
            lay_out(sliding(T, 2), partition),
            build_block=lambda t, chain=chain: chain.blocks[t],
            build_readout=lambda s, chain=chain: chain.readouts[str(s)],
            loss=chain.loss,
            optimizer=KeepGradients,
            num_microbatches=M,
            options=options,
            timeout=timedelta(seconds=60),
        )
        parts = (part.chunk(num_replicas)[mesh.replica] for part in draw_batch(TOKENS, batch_size=4))
        pipeline.step(*parts)
        pipeline.close()
        assert pipeline._transport is not None
        types = {channel.dtype for channel in pipeline._transport._channels.values()}
        assert types == {options.precision.compute or torch.bfloat16}
        found[kind] = {name: p.grad for name, p in pipeline.named_parameters().items() if p.grad is not None}
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many as a rank has: layer norm sums the gradients of its weights thread by thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("partition", "M", "num_replicas"), [((1, 2, 1), 2, 1), ((2, 2), 1, 2)])
def test_ranks_equal_the_definition_with_the_same_casts(partition, M, num_replicas):
    by_rank = run_local_ranks(sum_on_rank, len(partition) * num_replicas, partition, M, num_replicas)
    for kind, options in TYPES.items():
        # The average over replicas is that over as many micro-batches: two halves, in whichever order.
        expected = expected_gradients(sliding(T, 2), partition, M * num_replicas, options, num_replicas)
        found: dict[str, Tensor] = {}
        for results in by_rank:
            for name, gradient in results[kind].items():
                assert torch.equal(found.setdefault(name, gradient), gradient)
        check_gradients(found, expected, is_same_order=True)


def train_in_plain_torch(chain: Chain, batches, M: int, options: StageOptions) -> list[list[float]]:
    """Steps of AdamW as one would write them; every micro-batch's loss."""
    precision = options.precision
    trained = [*chain.blocks.parameters(), *chain.readouts[str(T)].parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for inputs, labels in batches:
        sums = {parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained}
        losses.append([])
        for x, y in zip(inputs.chunk(M), labels.chunk(M), strict=True):
            with torch.autocast("cpu", dtype=precision.compute) if precision.compute else nullcontext():
                logits = chain(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            (loss / M).backward()
            losses[-1].append(float(loss.detach()))
            for parameter in trained:
                assert parameter.grad is not None
                sums[parameter] += parameter.grad
                parameter.grad = None
        for parameter, total in sums.items():
            parameter.grad = total.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16 weights"])
def test_twenty_steps_are_those_of_plain_torch_bit_for_bit(kind):
    M, options = 2, TYPES[kind]
    batches = [draw_batch(TOKENS, batch_size=4, seed=seed) for seed in range(20)]
    ours, plain = build(options), build(options)
    pipeline = start(ours, backprop(T), (T,), M, options, optimizer=lambda given: torch.optim.AdamW(given, lr=1e-2))
    losses = []
    # An autocast of the caller's own would keep copies of weights that have changed.
    with torch.autocast("cpu", dtype=torch.bfloat16) if options.precision.compute else nullcontext():
        for batch in batches:
            (record,) = pipeline.step(*batch)
            losses.append([float(loss) for loss in record.losses[1]])
            assert all(loss.dtype == torch.float32 for loss in record.losses[1])
    assert losses == train_in_plain_torch(plain, batches, M, options)
    assert_same(dict(ours.named_parameters()), dict(plain.named_parameters()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("windows", [backprop(T), sliding(T, 1)])
def test_losses_and_scores_are_in_float32_those_of_torch_autocast(dtype, windows):
    options = StageOptions(precision=Precision(dtype))
    chain, (tokens, labels) = build(options), draw_batch(TOKENS, batch_size=8)
    pipeline = start(chain, windows, (1, 3), 2, options)
    records = pipeline.step(tokens, labels)
    scores = pipeline.evaluate(tokens, labels)
    expected: dict[int, list[float]] = {s: [] for s in scores}
    for x, y in zip(tokens.chunk(2), labels.chunk(2), strict=True):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            state = x
            for boundary, block in enumerate(chain.blocks, start=1):
                state = block(state)
                if boundary in expected:
                    logits = chain.readouts[str(boundary)](state)
                    expected[boundary].append(float(F.cross_entropy(logits.flatten(0, 1), y.flatten())))
                if boundary == 1:  # to the second rank
                    state = state.to(dtype).float()
    losses = {pipeline.layout.blocks[s - 1].stop: v for record in records for s, v in record.losses.items()}
    assert set(losses) == set(expected)
    for boundary, wanted in expected.items():
        assert all(loss.dtype == torch.float32 for loss in losses[boundary])
        # Sums of float32 terms; bfloat16 would be off by up to 1 / 64 here.
        assert [float(loss) for loss in losses[boundary]] == pytest.approx(wanted, rel=1e-6)
        assert scores[boundary].loss == pytest.approx(sum(wanted) / 2, rel=1e-6)


class Held:
    """A saved tensor that tells when it dies."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class HeldCopies:
    """Counts copies of the weights in two bytes that autograd holds at once, by their shapes."""

    def __init__(self, chain: Chain) -> None:
        shapes = {tuple(part.weight.shape) for part in chain.modules() if isinstance(part, nn.Linear)}
        self._shapes = shapes | {shape[::-1] for shape in shapes}
        self._holders: Counter[int] = Counter()
        self.most = 0

    def pack(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        if tensor.itemsize == 2 and tuple(tensor.shape) in self._shapes:
            storage = tensor.untyped_storage()._cdata
            self._holders[storage] += 1
            weakref.finalize(held, self._release, storage)
            self.most = max(self.most, len(self._holders))
        return held

    def _release(self, storage: int) -> None:
        self._holders[storage] -= 1
        self._holders += Counter()  # drop those that nobody holds


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_in_flight_share_one_copy_of_each_weight(recompute, monkeypatch):
    options = StageOptions(precision=HALF, checkpoint=recompute)
    found = {}
    for way in ("once per step", "in every block"):
        if way == "in every block":
            monkeypatch.setattr(Precision, "step_scope", lambda *_: nullcontext())
        chain = build(options)
        copies = HeldCopies(chain)
        with torch.autograd.graph.saved_tensors_hooks(copies.pack, lambda held: held.tensor):
            records = start(chain, backprop(T), (2, 2), 4, options).step(*draw_batch(TOKENS, batch_size=4))
        assert [record.most_in_flight for record in records] == [2, 1]
        found[way] = gradients_of(chain), copies.most
    assert_same(found["once per step"][0], found["in every block"][0])
    if recompute:
        return  # blocks keep their inputs only
    # Four matrices of each block (attention's two, the MLP's two), and the head's.
    per_block, head = 4, 1
    assert found["once per step"][1] == T * per_block + head


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16 weights"])
def test_a_readout_that_first_reads_nothing_learns_from_the_next_micro_batch(kind, monkeypatch):
    """What is cast without gradients must not be found by a forward with them."""
    monkeypatch.setattr(Stage, "_step", keep_sums)
    chain = build(TYPES[kind])
    head = nn.Sequential(nn.Linear(16, 8), Counting(), nn.Linear(8, 11))
    chain.readouts[str(T)] = head.to(TYPES[kind].precision.weights)
    precision = TYPES[kind].precision
    tokens, labels = draw_batch(TOKENS, batch_size=2)
    labels[0] = -100
    with torch.no_grad(), precision.step_scope(tokens.device), precision.scope(tokens.device):
        chain(tokens)
        with torch.enable_grad():
            F.cross_entropy(chain(tokens).float().flatten(0, 1), labels.flatten()).backward()
    whole = gradients_of(chain)
    chain.zero_grad(set_to_none=True)
    start(chain, backprop(T), (2, 2), 2, TYPES[kind]).step(tokens, labels)
    found = gradients_of(chain)
    assert set(found) == set(whole)
    for name, gradient in found.items():
        assert (gradient - whole[name]).norm() <= 2**-5 * whole[name].norm(), name  # other roundings, of 8 bits


class Counting(nn.Module):
    """Has a buffer, so that it runs forward where there is nothing to read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, state: Tensor) -> Tensor:
        self.calls += 1
        return state


def train_within(whose: Callable[[], AbstractContextManager[object]], *, is_around_all: bool) -> list[float]:
    """Losses of six steps, with an autocast of the caller's own around all of them, or around each."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    optimizer = partial(torch.optim.SGD, lr=0.5)
    pipeline = build_pipeline(blocks, mean_squared_error, horizon=backprop(3), optimizer=optimizer, num_microbatches=2)
    inputs, labels = torch.randn(2, 4, 8)
    losses = []
    with whose() if is_around_all else nullcontext():
        for _ in range(6):
            with nullcontext() if is_around_all else whose():
                losses.append(pipeline.step(inputs, labels).losses[3])
            losses.append(pipeline.evaluate(inputs, labels)[3].loss if is_around_all else 0.0)
    return losses[::2]


def test_an_autocast_of_the_callers_own_around_many_steps_sees_every_update():
    whose = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    losses = train_within(whose, is_around_all=True)
    assert losses == train_within(whose, is_around_all=False)
    assert len(set(losses)) == 6


def test_gpus_multiply_in_tf32_if_they_may():
    before = torch.get_float32_matmul_precision()
    try:
        for device, is_allowed, expected in (
            ("cuda", True, "high"),
            ("cpu", False, "high"),
            ("cuda", False, "highest"),
        ):
            set_tf32(torch.device(device), is_allowed=is_allowed)
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
