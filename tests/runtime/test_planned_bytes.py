"""What a plan counts beside activations is what ranks hold: weights, messages posted ahead, replicas' buckets."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.models.chain import Chain
from mpc_dist.planner.measurements import MESSAGES_HELD, MESSAGES_HELD_ON_GPU
from mpc_dist.planner.pricing import predict_bytes
from mpc_dist.precision import FULL, Precision
from mpc_dist.profile import SavedBytes
from mpc_dist.profile.blocks import measure_blocks
from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime import Pipeline
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.transport import ACTIVATIONS, GLOO, NCCL, Channel, DistributedTransport
from mpc_dist.schedule import build_schedule, lay_out, simulate
from mpc_dist.windows import Windows, backprop, sliding

WIDTH, SAMPLES, M = 8, 32, 4
PARTITION = (1, 1, 1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


class Block(nn.Module):
    """Gives states of the type of its weights, whatever it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        return state + self.inner(self.norm(state)).tanh()


def build_blocks() -> list[nn.Module]:
    return [Block() for _ in PARTITION]


def draw_batch(precision: Precision) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH, dtype=precision.weights), torch.randn(SAMPLES, WIDTH)


PRECISIONS = {
    "float32": FULL,
    "bfloat16": Precision(torch.bfloat16),
    "bfloat16 weights": Precision(weights=torch.bfloat16),
}


def hold(rank: int, windows: Windows, num_replicas: int, precision: Precision) -> tuple[int, int, int]:
    """Of a rank after two steps: its fixed bytes, the most bytes of buffers posted at once, numbers per parameter."""
    posted: list[int] = [0]
    post = DistributedTransport._post

    def watch(self: DistributedTransport, channel: Channel, number: int | None = None) -> None:
        post(self, channel, number)
        receives = [one for (direction, _), one in self._channels.items() if direction == "receive"]
        posted.append(sum(message.tensor.nbytes for one in receives for message in one.posted))

    DistributedTransport._post = watch  # type: ignore[method-assign]
    blocks, timeout = build_blocks(), timedelta(seconds=60)
    launch = Launch(rank, len(PARTITION) * num_replicas, rank)
    pipeline = Pipeline(
        build_mesh(launch, num_stages=len(PARTITION), num_replicas=num_replicas, timeout=timeout),
        lay_out(windows, PARTITION),
        build_block=lambda t: blocks[t].to(precision.weights),
        build_readout=lambda _: Identity(),
        loss=mean_squared_error,
        optimizer=sgd,
        num_microbatches=M,
        options=StageOptions(precision=precision),
        timeout=timeout,
    )
    for _ in range(2):
        pipeline.step(*draw_batch(precision))
    pipeline.close()  # what was sent must outlive this function
    return pipeline.fixed_bytes, max(posted), len(pipeline.stage.parameters)


@pytest.mark.parametrize("kind", PRECISIONS)
@pytest.mark.parametrize(
    ("windows", "num_replicas"), [(backprop(3), 1), (sliding(3, 1), 2)], ids=["backprop", "horizon 1, 2 replicas"]
)
def test_a_rank_holds_beside_activations_what_was_planned(windows: Windows, num_replicas: int, kind: str):
    precision = PRECISIONS[kind]
    inputs, labels = (part[: SAMPLES // M] for part in draw_batch(precision))
    chain = Chain(build_blocks(), mean_squared_error).to(precision.weights)
    found = measure_blocks(chain, inputs, labels, sgd, precision=precision, repeats=1)
    layout = lay_out(windows, PARTITION)
    schedule = build_schedule(layout, M)
    price = simulate(schedule, layout, found.segment_costs(layout))
    planned = predict_bytes(found, layout, schedule, price, has_replicas=num_replicas > 1)
    by_rank = run_local_ranks(hold, len(PARTITION) * num_replicas, windows, num_replicas, precision)
    linear = WIDTH * WIDTH + WIDTH
    for rank, (fixed, posted, num_parameters) in enumerate(by_rank):
        stage = rank // num_replicas
        # A bucket also says of each parameter whether this replica has its gradient; that and all sums are float32.
        flags = 4 * num_parameters if num_replicas > 1 else 0
        assert fixed == planned[stage] - price.peak_bytes[stage] + flags
        sums = 4 * (1 + (num_replicas > 1))
        casts = 2 * linear if precision.compute else 0  # of what layer norm learns there is no copy
        weights = (linear + 2 * WIDTH) * (precision.weights.itemsize + sums)
        assert fixed == weights + casts + flags + posted
    message = SAMPLES // M * WIDTH * (4 if kind == "float32" else 2)
    num_channels = [1, 2, 1] if windows == backprop(3) else [0, 1, 1]
    assert [posted for _, posted, _ in by_rank[::num_replicas]] == [MESSAGES_HELD * message * n for n in num_channels]


@pytest.mark.parametrize("kind", PRECISIONS)
def test_activations_are_those_that_were_planned(kind: str):
    precision = PRECISIONS[kind]
    inputs, labels = draw_batch(precision)
    chain = Chain(build_blocks(), mean_squared_error).to(precision.weights)
    part = SAMPLES // M
    found = measure_blocks(chain, inputs[:part], labels[:part], sgd, precision=precision, repeats=1)
    layout = lay_out(backprop(3), PARTITION)
    schedule = build_schedule(layout, M)
    pipeline = InProcessPipeline(
        chain, layout, schedule, optimizer=sgd, options=StageOptions(precision=precision, seed=0)
    )
    meters = [SavedBytes([*chain.parameters(), inputs, labels]) for _ in PARTITION]
    pipeline.step(inputs, labels, contexts=meters)
    price = simulate(schedule, layout, found.segment_costs(layout))
    # The loss keeps two numbers or so of its own.
    assert [meter.peak for meter in meters] == pytest.approx(price.peak_bytes, rel=0.02)


def test_the_plan_counts_as_many_messages_as_are_posted():
    assert GLOO.posted_ahead == MESSAGES_HELD
    assert max(1, NCCL.posted_ahead) == MESSAGES_HELD_ON_GPU  # one is posted when its message is needed
    for manners in (GLOO, NCCL):
        channel = SimpleNamespace(shape=torch.Size([4]), dtype=torch.float32, is_used=True)
        channels: dict[tuple[str, str], Channel] = {("receive", ACTIVATIONS): channel}  # type: ignore[dict-item]
        transport = DistributedTransport(channels, rank=0, timeout=timedelta(seconds=1), manners=manners)
        assert transport.posted_bytes == 16 * (MESSAGES_HELD if manners is GLOO else MESSAGES_HELD_ON_GPU)


def test_a_plan_for_gpus_counts_their_messages():
    inputs, labels = draw_batch(FULL)
    chain = Chain(build_blocks(), mean_squared_error)
    assert measure_blocks(chain, inputs, labels, sgd, repeats=1).messages_held == MESSAGES_HELD
    counted = measure_blocks(chain, inputs, labels, sgd, flops_per_second=1e12)
    assert counted.messages_held == MESSAGES_HELD_ON_GPU
