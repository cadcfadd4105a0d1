"""Pipelines against plain torch where numbers could go wrong without an error."""

import copy
import math
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import StageOptions, build_pipeline
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.windows import backprop, sliding

M = 2


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_plainly(blocks: list[nn.Module], batches: list[tuple[Tensor, Tensor]]) -> nn.Sequential:
    """Trains the blocks, each micro-batch by itself as batch norm sees it."""
    model = nn.Sequential(*blocks)
    optimizer = sgd(list(model.parameters()))
    for inputs, labels in batches:
        for x, y in zip(inputs.chunk(M), labels.chunk(M), strict=True):
            (F.mse_loss(model(x), y) / M).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Turned(nn.Module):
    """A linear map whose output, and whose adjoint at the input, are views that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: Tensor) -> Tensor:
        turned = self.linear(state.transpose(1, 2)).tanh().transpose(1, 2)
        assert not turned.is_contiguous()
        return turned


def draw_turned() -> tuple[list[nn.Module], list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Turned() for _ in range(4)]
    return blocks, [(torch.randn(4, 6, 6), torch.randn(4, 6, 6)) for _ in range(3)]


def train_turned(rank: int) -> dict[str, Tensor]:
    blocks, batches = draw_turned()
    with build_pipeline(blocks, mean_squared_error, horizon=2, optimizer=sgd, num_microbatches=M) as pipeline:
        for inputs, labels in batches:
            pipeline.step(inputs, labels)
        return {name: weight.detach() for name, weight in pipeline.named_parameters().items()}


def test_states_that_are_not_contiguous_cross_between_ranks():
    found = {name: weight for part in run_local_ranks(train_turned, 2) for name, weight in part.items()}
    model = train_plainly(*draw_turned())
    assert len(found) == 8
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"blocks.{name}"], weight.detach())


def test_a_skipped_step_leaves_no_trace_in_batch_norm():
    """The second micro-batch of the second step is not finite: what the first moved goes back as well."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(3)]
    batches = [(torch.randn(8, 5), torch.randn(8, 5)) for _ in range(3)]
    plain = copy.deepcopy(blocks)
    spoilt = batches[1][0].clone()
    spoilt[-1] = math.nan
    options = StageOptions(on_nonfinite="skip")
    with build_pipeline(
        blocks, mean_squared_error, horizon=backprop(3), optimizer=sgd, num_microbatches=M, options=options
    ) as pipeline:
        results = [
            pipeline.step(inputs, labels) for inputs, labels in (batches[0], (spoilt, batches[1][1]), batches[2])
        ]
    assert [result.record.is_skipped for result in results] == [False, True, False]
    model = train_plainly(plain, [batches[0], batches[2]])
    found, expected = nn.Sequential(*blocks).state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    assert int(found["0.1.num_batches_tracked"]) == 2 * M


def test_readouts_drop_features_by_their_boundary():
    """A readout draws from its boundary, negated, so that it is no block's: the same for any partition."""
    torch.manual_seed(0)
    seed, T = 3, 3
    blocks: list[nn.Module] = [nn.Linear(6, 6) for _ in range(T)]
    readouts: dict[int, nn.Module] = {s: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6)) for s in range(1, T + 1)}
    plain, plain_heads = copy.deepcopy(blocks), copy.deepcopy(readouts)
    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(2)]
    options = StageOptions(seed=seed)
    with build_pipeline(
        *(blocks, mean_squared_error),
        **{"horizon": sliding(T, 1), "optimizer": sgd, "num_microbatches": M, "readouts": readouts, "options": options},
    ) as pipeline:
        losses = [pipeline.step(inputs, labels).losses for inputs, labels in batches]

    optimizer = sgd([p for module in (*plain, *plain_heads.values()) for p in module.parameters()])
    for step, (inputs, labels) in enumerate(batches):
        expected = dict.fromkeys(plain_heads, 0.0)
        for microbatch, (x, y) in enumerate(zip(inputs.chunk(M), labels.chunk(M), strict=True)):
            for boundary, block in enumerate(plain, start=1):
                x = block(x.detach())
                torch.manual_seed(zlib.crc32(f"{seed} 0 {step} {microbatch} {-boundary}".encode()))
                loss = F.mse_loss(plain_heads[boundary](x), y) / M
                loss.backward()
                expected[boundary] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(expected)
    for found, wanted in zip((*blocks, *readouts.values()), (*plain, *plain_heads.values()), strict=True):
        for (name, weight), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(weight, other, msg=name)
