"""The executor in one process equals the definition: every parameter, any windows, any partition, any micro-batches."""

import copy
import math
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.precision import Precision
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import backward as ways
from mpc_dist.runtime import build_pipeline
from mpc_dist.runtime import pipeline as pipelines
from mpc_dist.runtime.backward import Graph, run_weight_halves
from mpc_dist.runtime.branches import BranchFinder
from mpc_dist.runtime.executor import Executor, StepRecord
from mpc_dist.runtime.guard import Finding, Guard
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.loss_scale import LossScale
from mpc_dist.runtime.microbatch import cut
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.transport import DistributedTransport
from mpc_dist.schedule import build_schedule, lay_out, parse_action, split_evenly
from mpc_dist.schedule.action import Op
from mpc_dist.windows import Windows, backprop, cumulative, expand, loco, sliding, tumbling
from tests.examples import TOKENS, assert_same, build_dense_chain, build_example, draw_batch
from tests.runtime.reference import KeepGradients, reference_gradients, train_reference
from tests.schedule.layouts import named_windows, partitions
from tests.test_windows import window_maps

pytestmark = pytest.mark.usefixtures("float64")

ROUNDING = 1e-12  # a few dozen float64 terms of size about 1, summed in another order


def build(
    chain: Chain, windows: Windows, partition, M: int, *, split: bool, optimizer=KeepGradients, **options
) -> InProcessPipeline:
    layout = lay_out(windows, partition)
    schedule = build_schedule(layout, M, split=split)
    return InProcessPipeline(chain, layout, schedule, optimizer=optimizer, options=StageOptions(**options))


def gradients_of(chain: Chain) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in chain.named_parameters() if p.grad is not None}


@given(windows=named_windows() | window_maps(), M=st.integers(1, 5), split=st.booleans(), data=st.data())
@settings(max_examples=150)
def test_the_pipeline_equals_the_definition(windows: Windows, M, split, data):
    widths = [3, *data.draw(st.lists(st.integers(2, 5), min_size=windows.num_blocks, max_size=windows.num_blocks))]
    chain, _, _ = build_dense_chain(widths, seed=data.draw(st.integers(0, 99)))
    inputs, labels = torch.randn(2 * M, 3), torch.randn(2 * M, 3)
    pipeline = build(chain, windows, data.draw(partitions(windows.num_blocks)), M, split=split)
    records = pipeline.step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, windows, M), tolerance=ROUNDING)
    assert all(not stage.executor.left_over() for stage in pipeline.stages)
    assert max(record.most_in_flight for record in records) <= pipeline.layout.span + 1


@pytest.mark.parametrize("name", ["gpt", "res_mlp", "res_mlp on images"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("build_windows", [lambda T: sliding(T, 2), lambda T: cumulative(T, 3), backprop, loco])
def test_every_model_equals_the_definition(name, split, build_windows):
    chain, inputs, labels = build_example(name)
    windows = build_windows(chain.num_blocks)
    build(chain, windows, split_evenly(chain.num_blocks, 3), 2, split=split).step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, windows, 2), tolerance=ROUNDING)


@pytest.mark.parametrize("split", [False, True])
def test_batch_norm_normalises_each_micro_batch_and_moves_its_statistics_once_for_each(split):
    """The policy: as if every micro-batch were a batch of its own, in order."""
    chain, inputs, labels = build_example("resnet_cifar")
    reference = copy.deepcopy(chain)
    windows = sliding(6, 2)
    build(chain, windows, (2, 1, 3), 2, split=split).step(inputs, labels)
    expected = reference_gradients(reference, inputs, labels, windows, 2)
    assert_same(gradients_of(chain), expected, tolerance=ROUNDING)
    for (name, buffer), (_, wanted) in zip(chain.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=ROUNDING, atol=ROUNDING, msg=name)


@pytest.mark.parametrize("h", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    ],
    ids=["SGD with momentum", "AdamW"],
)
@pytest.mark.parametrize("split", [False, True])
def test_weights_after_six_steps_equal_the_sequential_reference(h, optimizer, split):
    chain, _, _ = build_dense_chain([3, 4, 5, 4, 3, 4, 3])
    reference = copy.deepcopy(chain)
    windows = sliding(6, h)
    batches = [(torch.randn(6, 3), torch.randn(6, 3)) for _ in range(6)]
    pipeline = build(chain, windows, (2, 1, 2, 1), 3, split=split, optimizer=optimizer)
    for batch in batches:
        pipeline.step(*batch)
    train_reference(reference, batches, windows, 3, optimizer)
    # AdamW divides by small second moments, which magnifies rounding by up to 1/eps of its state at the first steps.
    assert_same(dict(chain.named_parameters()), dict(reference.named_parameters()), tolerance=1e-9)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_is_the_same_for_any_partition_schedule_and_windows(checkpoint):
    results = []
    for partition, split in (((4,), False), ((1, 3), False), ((2, 1, 1), True), ((1, 1, 1, 1), True)):
        chain = build_chain(GPT(num_blocks=4, width=8, num_heads=2, dropout=0.3), TOKENS)
        inputs, labels = draw_batch(TOKENS)
        pipeline = build(chain, sliding(4, 2), partition, 2, split=split, seed=3, checkpoint=checkpoint)
        pipeline.step(inputs, labels)
        results.append(gradients_of(chain))
        torch.manual_seed(len(results))  # the global random state must not matter
    for result in results[1:]:
        assert_same(result, results[0], tolerance=ROUNDING)


def test_dropout_differs_between_steps_and_micro_batches():
    chain = build_chain(GPT(num_blocks=2, width=8, num_heads=2, dropout=0.5), TOKENS)
    tokens, labels = draw_batch(TOKENS, batch_size=1)
    pipeline = build(chain, backprop(2), (1, 1), 2, split=False)
    losses = []
    for _ in range(2):
        record = pipeline.step(tokens.repeat(2, 1), labels.repeat(2, 1))[-1]
        losses += [float(loss) for loss in record.losses[2]]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("split", [False, True])
def test_checkpointed_blocks_give_the_same_gradients(split):
    chain, inputs, labels = build_example("gpt")
    build(chain, sliding(5, 3), (2, 2, 1), 2, split=split, checkpoint=True).step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, sliding(5, 3), 2), tolerance=ROUNDING)


def test_a_parameter_used_twice_in_a_block_splits_exactly():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, state):
            return self.inner(torch.tanh(self.inner(state)) + self.bias) + self.bias.square().sum()

    chain = Chain([Twice() for _ in range(3)], mean_squared_error)
    inputs, labels = torch.randn(4, 3), torch.randn(4, 3)
    build(chain, backprop(3), (1, 1, 1), 2, split=True).step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, backprop(3), 2), tolerance=ROUNDING)


def test_halves_compute_no_activation_gradient_twice():
    """Each block's tanh is differentiated once per adjoint, whole or in halves."""
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, state):
            for layer in self.layers:
                state = Counted.apply(layer(state))
            return state

    counts = []
    for split in (False, True):
        calls.clear()
        chain = Chain([Block() for _ in range(3)], mean_squared_error)
        build(chain, backprop(3), (1, 1, 1), 2, split=split).step(torch.randn(4, 3), torch.randn(4, 3))
        counts.append(len(calls))
    assert counts[0] == counts[1] == 3 * 4 * 2


def test_a_relay_does_no_weight_gradient_work():
    """A product's backward is asked for its weight's gradient once per block, however many relays cross it."""
    asked: list[bool] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            asked.append(ctx.needs_input_grad[1])
            return gradient * weight, (gradient * x).sum(0) if ctx.needs_input_grad[1] else None

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3) + 0.5)

        def forward(self, state):
            return Product.apply(state, self.weight)

    chain = Chain([Scale() for _ in range(4)], mean_squared_error)
    touched: list[str] = []
    for name, parameter in chain.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: touched.append(name))
    build(chain, sliding(4, 3), (1, 1, 1, 1), 1, split=False).step(torch.randn(4, 3), torch.randn(4, 3))
    assert sorted(touched) == [f"blocks.{t}.weight" for t in range(4)]
    assert len(asked) == 4 + 2  # a backward per block; readout 3 is relayed by blocks 1 and 2


def test_gradients_are_clipped_per_stage():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    reference = reference_gradients(chain, inputs, labels, backprop(3), 1)
    build(chain, backprop(3), (1, 2), 1, split=False, clip_norm=1e-3).step(inputs, labels)
    for stage in (("blocks.0",), ("blocks.1", "blocks.2", "readouts.3")):
        own = {name: g for name, g in gradients_of(chain).items() if name.startswith(stage)}
        norm = torch.cat([g.flatten() for g in own.values()]).norm()
        assert norm.item() == pytest.approx(1e-3, rel=1e-2)
        scale = 1e-3 / (torch.cat([reference[name].flatten() for name in own]).norm() + 1e-6)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, reference[name] * scale)


def test_bfloat16_autocast_is_near_float32():
    torch.set_default_dtype(torch.float32)
    chain, inputs, labels = build_example("gpt")
    reference = reference_gradients(chain, inputs, labels, sliding(5, 2), 2)
    build(chain, sliding(5, 2), (2, 3), 2, split=False, precision=Precision(torch.bfloat16)).step(inputs, labels)
    for name, gradient in gradients_of(chain).items():
        error = (gradient - reference[name]).norm() / reference[name].norm()
        assert 0 < error < 0.05, name  # bfloat16 keeps 8 bits


def test_evaluation_scores_every_readout_and_changes_nothing():
    chain, inputs, labels = build_example("resnet_cifar")
    before = {key: value.clone() for key, value in chain.state_dict().items()}
    pipeline = build(chain, sliding(6, 2), (2, 1, 3), 2, split=False)
    scores = pipeline.evaluate(inputs, labels)
    assert list(scores) == [2, 3, 4, 5, 6]
    assert all(torch.equal(value, before[key]) for key, value in chain.state_dict().items())
    chain.eval()
    with torch.no_grad():
        state = inputs
        for boundary, block in enumerate(chain.blocks, start=1):
            state = block(state)
            if boundary in scores:
                prediction = chain.predict(boundary, state)
                assert scores[boundary].loss == pytest.approx(chain.loss(prediction, labels).item(), rel=1e-12)
                assert scores[boundary].accuracy == (prediction.argmax(-1) == labels).double().mean().item()


@pytest.mark.parametrize("h", [1, 2, 8])
def test_in_flight_micro_batches_are_those_of_the_schedule(h):
    chain, _, _ = build_dense_chain([3] * 9)
    records = build(chain, sliding(8, h), (1,) * 8, 10, split=False).step(torch.randn(10, 3), torch.randn(10, 3))
    held = [record.most_in_flight for record in records]
    assert held == [8, 7, 6, 5, 4, 3, 2, 1] if h == 8 else max(held) <= {1: 1, 2: 3}[h]


def test_losses_are_reported_at_every_readout():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    records = build(chain, tumbling(3, 2), (1, 1, 1), 2, split=False).step(inputs, labels)
    reported = {s: [float(v) for v in values] for record in records for s, values in record.losses.items()}
    assert set(reported) == {2, 3}
    state = chain.blocks[1](chain.blocks[0](inputs[:2]))
    assert reported[2][0] == pytest.approx(chain.loss_at(2, state, labels[:2]).item())


def test_a_batch_that_cannot_be_cut_evenly_is_refused():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    pipeline = build(chain, backprop(3), (3,), 3, split=False)
    with pytest.raises(ValueError, match="a batch of 4 cannot be cut into 3 equal micro-batches"):
        pipeline.step(inputs, labels)
    with pytest.raises(ValueError, match="4 inputs but 3 labels"):
        pipeline.step(inputs, labels[:3])


def test_horizon_in_stages_equals_anchored_windows():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4, 3])
    in_stages = expand(sliding(2, 1), (3, 1))
    build(chain, in_stages, (3, 1), 2, split=False).step(inputs, labels)
    expected = mpc_gradients(chain, inputs, labels, sliding(4, 1, anchors=[3, 4]))
    assert_same(gradients_of(chain), expected, tolerance=ROUNDING)


def test_a_number_that_is_not_finite_is_told_as_received_where_it_did_not_begin():
    chain, inputs, labels = build_dense_chain([3, 4, 5, 4])
    pipeline = build(chain, sliding(3, 1), (1, 2), 2, split=False, on_nonfinite="skip")
    with torch.no_grad():
        chain.blocks[0][-1].bias[0] = math.inf
    first, second = pipeline.step(inputs, labels)
    assert first.finding == Finding("activation", 0, 0, is_received=False)
    assert second.finding == Finding("activation", 1, 0, is_received=True)


def test_the_input_half_leaves_all_weight_gradients_to_the_weight_half():
    chain, inputs, _ = build_dense_chain([3, 4, 5])
    source = inputs.detach().requires_grad_()
    parameters = list(chain.blocks.parameters())
    output = chain.blocks[1](chain.blocks[0](source))
    graph = Graph(source, output, parameters, BranchFinder(parameters))
    below, left = graph.run_input_half(torch.ones_like(output))
    assert all(parameter.grad is None for parameter in parameters)
    run_weight_halves([left])
    expected = torch.autograd.grad(chain.blocks[1](chain.blocks[0](source)).sum(), [source, *parameters])
    for found, wanted in zip([below, *(parameter.grad for parameter in parameters)], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=ROUNDING, atol=ROUNDING)


class Spare(nn.Module):
    """Has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.used(state)


def test_a_scaled_loss_leaves_weights_alone_that_have_no_gradient():
    chain = Chain([Spare()], mean_squared_error)
    before = copy.deepcopy(chain)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss_scale": LossScale(8.0)}
    inputs, labels = torch.randn(2, 4, 3)
    build(chain, backprop(1), (1,), 2, split=False, **options).step(inputs, labels)
    mean_squared_error(before.blocks[0](inputs), labels).backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    for parameter, wanted in zip(chain.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=ROUNDING, atol=ROUNDING)


def test_what_a_rank_holds_counts_weights_gradients_and_buffers():
    block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    pipeline = build_pipeline([block], mean_squared_error, horizon=backprop(1), optimizer=KeepGradients)
    pipeline.connect(*torch.randn(2, 4, 3))
    weights = sum(p.nbytes for p in block.parameters())
    assert pipeline.fixed_bytes == 2 * weights + sum(buffer.nbytes for buffer in block.buffers())


def test_only_what_the_last_backward_adds_to_is_waited_for_by_the_replicas():
    """A readout's gradient is complete before: it may travel while blocks are still at work."""
    chain, inputs, labels = build_dense_chain([3, 4, 5])
    pipeline = build(chain, sliding(2, 1), (2,), 2, split=False)
    (stage,) = pipeline.stages
    announced: list[tuple[list, list]] = []

    class Reducer:
        def expect(self, parameters, coming):
            announced.append((list(parameters), list(coming)))

        def start(self, parameters): ...

        def finish(self):
            return []

    stage._reducer = Reducer()
    pipeline.step(inputs, labels)
    names = {id(p): name for name, p in chain.named_parameters()}
    found = {tuple(names[id(p)].split(".")[0] for p in part) for both in announced for part in both}
    assert found == {("blocks",) * 4 + ("readouts",) * 2, ("blocks",) * 4}
    for parameters, coming in announced:
        assert [names[id(p)] for p in parameters[:4]] == [names[id(p)] for p in coming]


@pytest.mark.parametrize(("held", "number"), [([{0, 1}], 2), ([{0}, {1, 2}], 3), ([set(), {0}, {0, 1}], 2)])
def test_a_micro_batch_in_several_segments_of_a_rank_counts_once(held, number):
    executor = Executor.__new__(Executor)
    executor._segments = {index: SimpleNamespace(in_flight=own) for index, own in enumerate(held)}
    executor._record = StepRecord()
    executor._count_in_flight()
    assert executor._record.most_in_flight == number


def test_what_a_rank_is_doing_is_said():
    pipeline = build_pipeline([nn.Linear(3, 3)], mean_squared_error, horizon=backprop(1), optimizer=KeepGradients)
    assert pipeline.mesh.watch.phase == "start-up"
    pipeline.step(*torch.randn(2, 4, 3))
    assert pipeline.mesh.watch.phase == "training"
    pipeline.change_windows(backprop(1))
    assert pipeline.mesh.watch.phase == "change of windows"


def test_a_batch_is_loaded_before_the_update_and_cut_once(monkeypatch):
    done: list[str] = []
    pipeline = build_pipeline(
        [nn.Linear(3, 3)],
        mean_squared_error,
        horizon=backprop(1),
        optimizer=KeepGradients,
        options=StageOptions(on_nonfinite="stop"),
    )
    first, second = torch.randn(2, 2, 4, 3)
    pipeline.connect(*first)
    executor, decide = pipeline.stage.executor, Guard.decide
    backward = executor._handlers[Op.BACKWARD]
    monkeypatch.setitem(executor._handlers, Op.BACKWARD, lambda action: done.append("backward") or backward(action))
    monkeypatch.setattr(Guard, "decide", lambda self, **given: done.append("decide") or decide(self, **given))
    monkeypatch.setattr(pipelines, "cut", lambda *given, **more: done.append("cut") or cut(*given, **more))
    inputs, labels = second
    pipeline.step(*first, meanwhile=lambda: pipeline.load(inputs, labels))
    assert done == ["cut", "backward", "cut", "decide"]
    pipeline.step(inputs, labels)
    assert done[4:] == ["backward", "decide"]
    pipeline.step(*first)
    assert done[6:] == ["cut", "backward", "decide"]


def test_on_the_cpu_no_batch_is_copied():
    batch = torch.randn(4, 3)
    parts = cut(batch, batch, 2, mean_squared_error).to(torch.device("cpu"))
    assert [part.data_ptr() for part in parts.inputs] == [batch[m].data_ptr() for m in (0, 2)]


def test_waiting_is_counted_for_the_neighbour_that_is_waited_for():
    transport = DistributedTransport({}, rank=0, timeout=timedelta(seconds=1))
    slow = SimpleNamespace(wait=lambda *_: time.sleep(0.05))
    for peer in (3, 3, 1):
        transport._wait(slow, parse_action("RA1.0"), SimpleNamespace(peer=peer), "receiving from", by_host=True)
    assert 0.05 < transport.waiting_for[1] < transport.waiting_for[3] < 30
    assert transport.seconds_waiting == sum(transport.waiting_for.values())


class Routed(nn.Module):
    """Its way, and the weights that it uses, depend on the data; two of them lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        way = int(state.detach().sum() > 0)
        left, right = (self.ways[way](state) * self.scale).chunk(2, dim=0)
        return torch.cat([left, torch.tanh(self.ways[2](right))]) + self.ways[1 - way](state) * way


def test_blocks_whose_way_depends_on_the_data_split_exactly():
    torch.manual_seed(0)
    chain = Chain([nn.Linear(3, 3), Routed(), Routed()], mean_squared_error)
    inputs, labels = torch.randn(2, 24, 3)
    inputs = inputs * torch.tensor([1.0, -3.0]).repeat_interleave(2).repeat(6)[:, None]
    build(chain, sliding(3, 2), (1, 2), 6, split=True).step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, sliding(3, 2), 6), tolerance=ROUNDING)


class Two(torch.autograd.Function):
    """Two outputs, of which a gradient arrives at the second first."""

    @staticmethod
    def forward(ctx, state, weight):
        ctx.save_for_backward(state, weight)
        return state * weight, (state + weight).sin()

    @staticmethod
    def backward(ctx, first, second):
        state, weight = ctx.saved_tensors
        second = second * (state + weight).cos()
        return first * weight + second, (first * state + second).sum(dim=0)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        left, right = Two.apply(state, self.weight)
        return left + right


def test_weights_of_an_operation_with_two_outputs_split_exactly():
    torch.manual_seed(0)
    chain = Chain([nn.Linear(3, 3), Both(), Both()], mean_squared_error)
    inputs, labels = torch.randn(2, 4, 3)
    build(chain, backprop(3), (1, 2), 2, split=True).step(inputs, labels)
    assert_same(gradients_of(chain), reference_gradients(chain, inputs, labels, backprop(3), 2), tolerance=ROUNDING)


def count_calls_of_the_engine(chain: Chain, **options) -> int:
    """In a step with 2 micro-batches, of all weight halves."""
    inputs, labels = draw_batch(TOKENS)
    pipeline = build(chain, backprop(chain.num_blocks), (1, chain.num_blocks - 1), 2, split=True, **options)
    calls = []
    add = ways.add_gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "add_gradients", lambda *given, **more: calls.append(given) or add(*given, **more))
        pipeline.step(inputs, labels)
    return len(calls) - 2  # the first stage's whole backwards


def test_a_weight_half_takes_as_many_calls_of_the_engine_whatever_the_number_of_blocks():
    calls = {count_calls_of_the_engine(build_chain(GPT(num_blocks=n, width=8, num_heads=2), TOKENS)) for n in (2, 3, 6)}
    assert calls == {2 * 6}  # a call for each of a block's norms and linear maps
