"""What a plan counts beside activations is what ranks hold: weights, messages posted ahead, replicas' buckets."""

from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.models.chain import Chain
from mpc_dist.planner.pricing import MESSAGES_HELD, predict_bytes
from mpc_dist.profile.blocks import measure_blocks
from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime import Pipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.transport import GLOO, Channel, DistributedTransport
from mpc_dist.schedule import build_schedule, lay_out, simulate
from mpc_dist.windows import Windows, backprop, sliding

WIDTH, SAMPLES, M = 8, 32, 4
PARTITION = (1, 1, 1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def build_blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in PARTITION]


def draw_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)


def hold(rank: int, windows: Windows, num_replicas: int) -> tuple[int, int, int]:
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
        build_block=blocks.__getitem__,
        build_readout=lambda _: Identity(),
        loss=mean_squared_error,
        optimizer=sgd,
        num_microbatches=M,
        timeout=timeout,
    )
    for _ in range(2):
        pipeline.step(*draw_batch())
    pipeline.close()  # what was sent must outlive this function
    return pipeline.fixed_bytes, max(posted), len(pipeline.stage.parameters)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("windows", [backprop(3), sliding(3, 1)], ids=["backprop", "horizon 1"])
def test_a_rank_holds_beside_activations_what_was_planned(windows: Windows, num_replicas: int):
    inputs, labels = (part[: SAMPLES // M] for part in draw_batch())
    found = measure_blocks(Chain(build_blocks(), mean_squared_error), inputs, labels, sgd, repeats=1)
    layout = lay_out(windows, PARTITION)
    schedule = build_schedule(layout, M)
    price = simulate(schedule, layout, found.segment_costs(layout))
    planned = predict_bytes(found, layout, schedule, price, has_replicas=num_replicas > 1)
    by_rank = run_local_ranks(hold, len(PARTITION) * num_replicas, windows, num_replicas)
    for rank, (fixed, posted, num_parameters) in enumerate(by_rank):
        stage = rank // num_replicas
        weights = found.blocks[stage].parameter_bytes
        # A bucket also says of each parameter whether this replica has its gradient.
        flags = 4 * num_parameters if num_replicas > 1 else 0
        assert fixed == planned[stage] - price.peak_bytes[stage] + flags
        assert fixed == (2 + (num_replicas > 1)) * weights + flags + posted
    message = SAMPLES // M * WIDTH * 4
    num_channels = [1, 2, 1] if windows == backprop(3) else [0, 1, 1]
    assert [posted for _, posted, _ in by_rank[::num_replicas]] == [MESSAGES_HELD * message * n for n in num_channels]


def test_the_plan_counts_as_many_messages_as_are_posted():
    assert GLOO.posted_ahead == MESSAGES_HELD
