"""Replicas of a stage: gradients that only some of them have, buckets, and the check that they agree."""

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime import Pipeline, StageOptions
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, build_mesh
from mpc_dist.runtime.reducer import BUCKET_BYTES, FIRST_BUCKET_BYTES, bucket_bytes, fill_buckets
from mpc_dist.runtime.replicas import ReplicaError, sum_bits
from mpc_dist.runtime.zero import ZeroSettings
from mpc_dist.schedule import lay_out
from mpc_dist.schedule.action import Op
from mpc_dist.windows import Windows, backprop

TIMEOUT = timedelta(seconds=60)
WIDTH, BATCH, STEPS = 6, 4, 20
NEVER_USED = 3


class Experts(nn.Module):
    """A sample goes to the expert that its first feature names: one that no sample names has no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Tensor) -> Tensor:
        chosen = state[:, 0].detach().clamp(-1, 1).add(1).mul(1.49).long()  # 0, 1 or 2
        outputs = torch.zeros_like(state)
        for index, expert in enumerate(self.experts):
            if (chosen == index).any():
                outputs = outputs + torch.where((chosen == index)[:, None], expert(state), 0)
        return state + torch.tanh(self.gate(state)) + 0.5 * outputs


def build_blocks(dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Experts().to(dtype) for _ in range(2)]


def whole_batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda: torch.randn(2 * BATCH, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    found = []
    for step in range(STEPS):
        inputs, labels = draw(), draw()
        # Each replica's part names experts of its own, in turns.
        inputs[:BATCH, 0] = -1.0 if step % 2 else 0.0
        inputs[BATCH:, 0] = 1.0 if step % 3 else 0.0
        found.append((inputs.to(dtype), labels.to(dtype)))
    return found


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    windows: Windows
    num_microbatches: int = 1
    split: bool = False
    zero: int | None = None


def connect(rank: int, case: Case, blocks: list[nn.Module], num_stages: int = 1, **options: object) -> Pipeline:
    mesh = build_mesh(Launch(rank, 2 * num_stages, rank), num_stages=num_stages, num_replicas=2, timeout=TIMEOUT)
    return Pipeline(
        mesh,
        lay_out(case.windows, [len(blocks) // num_stages] * num_stages),
        build_block=lambda t: blocks[t],
        build_readout=lambda _: Identity(),
        loss=mean_squared_error,
        optimizer=adamw,
        num_microbatches=case.num_microbatches,
        split=case.split,
        options=StageOptions(**options),
        zero=None if case.zero is None else ZeroSettings(case.zero),
        timeout=TIMEOUT,
    )


def train(rank: int, case: Case) -> dict[str, Tensor]:
    dtype = torch.float64 if case.zero is None else torch.float32
    pipeline = connect(rank, case, build_blocks(dtype))
    part = slice(rank * BATCH, (rank + 1) * BATCH)
    for inputs, labels in whole_batches(dtype):
        pipeline.step(inputs[part], labels[part])
    pipeline.check_replicas()
    return {name: p.detach().clone() for name, p in pipeline.named_parameters().items()}


def train_in_plain_torch(dtype: torch.dtype, *, zeros: bool) -> dict[str, Tensor]:
    """The whole batch in one process, with nothing of ours; `zeros` stand for gradients that there are not."""
    model = nn.Sequential(*build_blocks(dtype))
    update = adamw(list(model.parameters()))
    for inputs, labels in whole_batches(dtype):
        nn.functional.mse_loss(model(inputs), labels).backward()
        for parameter in model.parameters() if zeros else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        update.step()
        update.zero_grad()
    return {f"blocks.{name}": p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "case",
    [Case(backprop(2)), Case(backprop(2), 2), Case(backprop(2), 4, split=True)],
    ids=["plain", "micro-batches", "split"],
)
def test_experts_that_one_replica_does_not_reach_train_as_in_one_process(case: Case):
    expected = train_in_plain_torch(torch.float64, zeros=False)
    for weights in run_local_ranks(train, 2, case):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            # Sums of float64 in another order.
            torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-12, msg=name)
    untouched = dict(nn.Sequential(*build_blocks(torch.float64)).named_parameters())
    name = f"0.experts.{NEVER_USED}.weight"
    assert torch.equal(expected[f"blocks.{name}"], untouched[name])  # not even decayed, as in plain torch


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_that_one_replica_does_not_reach_train_as_in_one_process_under_zero(stage: int):
    expected = train_in_plain_torch(torch.float32, zeros=True)
    first, second = run_local_ranks(train, 2, Case(backprop(2), 2, zero=stage))
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), name
        # float32, 20 steps of AdamW: its update does not shrink with a gradient that is all rounding.
        torch.testing.assert_close(first[name], value, rtol=2e-4, atol=2e-5, msg=name)


def part_ways(rank: int, name: str) -> str | None:
    pipeline = connect(rank, Case(backprop(4)), [nn.Linear(WIDTH, WIDTH) for _ in range(4)], num_stages=2)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in pipeline.named_parameters().values():
            parameter.normal_()
    pipeline.check_replicas()  # they agree so far
    if pipeline.mesh.replica == 1 and name in pipeline.named_parameters():
        with torch.no_grad():
            first = pipeline.named_parameters()[name].view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.tensor(9.0)))  # the least that a float can differ
    try:
        pipeline.check_replicas()
    except ReplicaError as error:
        return str(error)
    return None


def test_the_check_names_stage_replica_and_weight_that_differ_by_one_bit():
    texts = run_local_ranks(part_ways, 4, "blocks.3.bias")
    assert texts[:2] == [None, None]  # the first stage is whole
    for text in texts[2:]:
        assert text is not None
        assert text.startswith("stage 1: blocks.3.bias of replica 1 differ from replica 0's")
        assert "\n" not in text


def test_the_check_tells_every_type_of_weight():
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.complex64):
        weight = torch.randn(5, 3).to(dtype)
        other = weight.clone()
        assert torch.equal(sum_bits(weight), sum_bits(other.t().contiguous().t()))
        other[4, 2] += 1
        assert not torch.equal(sum_bits(weight), sum_bits(other)), dtype


def watch_buckets(rank: int, split: bool) -> tuple[list[tuple[float, int]], float, int, int]:
    """When each bucket left and its size, the end of the last backward, what is held, and what weights take."""
    torch.manual_seed(0)
    blocks = [nn.Linear(512, 512, bias=False) for _ in range(8)]  # 1 MiB each
    pipeline = connect(rank, Case(backprop(8), 2, split=split), blocks, record_times=True)
    for _ in range(2):
        record = pipeline.step(torch.randn(64, 512), torch.randn(64, 512)).record
    last = max(i.end for i in record.timeline if i.action.op in (Op.BACKWARD, Op.WEIGHT_HALF))
    weights = sum(p.nbytes for p in pipeline.named_parameters().values())
    return [(r.start, r.size) for r in record.reductions], last, pipeline.fixed_bytes, weights


@pytest.mark.parametrize("split", [False, True])
def test_gradients_leave_before_the_last_backward_ends_and_their_buckets_are_counted(split: bool):
    for reductions, backward_end, fixed, weights in run_local_ranks(watch_buckets, 2, split):
        assert len(reductions) == 2
        starts, sizes = zip(*reductions, strict=True)
        assert list(starts) == sorted(starts)
        assert starts[0] < backward_end - 1e-4, "the first bucket waited for the whole backward"
        assert sum(sizes) == bucket_bytes([torch.empty(512, 512)] * 8)
        # Weights, gradients, two moments (and their counts of steps), and the buckets.
        assert fixed == 4 * weights + 8 * 4 + sum(sizes)


def test_buckets_have_the_sizes_of_torchs_ddp_and_one_type_each():
    sizes = [10, 300_000, 6_500_000, 200, 100]
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes] + [nn.Parameter(torch.empty(7).half())]
    found = [[p.numel() for p in bucket] for bucket in fill_buckets(parameters)]
    assert found == [[7], [100, 200, 6_500_000], [300_000, 10]]
    assert FIRST_BUCKET_BYTES == 1024**2
    assert BUCKET_BYTES == 25 * 1024**2
