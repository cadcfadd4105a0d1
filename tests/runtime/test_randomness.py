"""What a block draws depends on seed, step, micro-batch and block alone; the generator is left as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpc_dist.models import Chain
from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.windows import backprop, sliding
from tests.examples import assert_same
from tests.runtime.reference import KeepGradients

pytestmark = pytest.mark.usefixtures("float64")


class Functional(nn.Module):
    """Drops features by a function; no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, state: Tensor) -> Tensor:
        return F.dropout(self.linear(state), 0.5, self.training)


class DropPath(Functional):
    """Leaves whole samples out, as in timm."""

    def forward(self, state: Tensor) -> Tensor:
        kept = torch.rand(len(state), 1) < 0.5 if self.training else torch.ones(len(state), 1)
        return state + self.linear(state) * kept


class Leaky(Functional):
    """A random slope."""

    def forward(self, state: Tensor) -> Tensor:
        return F.rrelu(self.linear(state), training=self.training)


def build(kind: type[nn.Module], readout: type[nn.Module] | None = None) -> Chain:
    torch.manual_seed(1)
    blocks = [kind() for _ in range(4)]
    return Chain(blocks, mean_squared_error, None if readout is None else {s: readout() for s in range(1, 5)})


def train(chain: Chain, partition, *, split: bool, recompute: bool) -> dict[str, Tensor]:
    layout = lay_out(sliding(4, 2), partition)
    pipeline = InProcessPipeline(
        chain,
        layout,
        build_schedule(layout, 2, split=split),
        optimizer=KeepGradients,
        options=StageOptions(seed=3, checkpoint=recompute),
    )
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(2, 6, 4, generator=generator)
    pipeline.step(inputs, labels)
    return {key: p.grad for key, p in chain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [Functional, DropPath, Leaky])
@pytest.mark.parametrize("recompute", [False, True])
def test_functions_that_draw_are_the_same_for_any_partition_and_global_generator(kind, recompute):
    results = []
    for partition, split in (((4,), False), ((1, 3), False), ((2, 1, 1), True), ((1, 1, 1, 1), True)):
        chain = build(kind, Functional)
        torch.manual_seed(len(results))
        results.append(train(chain, partition, split=split, recompute=recompute))
    for result in results[1:]:
        assert_same(result, results[0], tolerance=1e-12)
    quiet = train(build(kind, Functional).eval(), (4,), split=False, recompute=recompute)
    assert any(not torch.equal(results[0][key], quiet[key]) for key in quiet)  # something was drawn


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_and_an_evaluation_leave_the_generator_as_it_was(recompute):
    chain = build(Functional)
    layout = lay_out(backprop(4), (2, 2))
    pipeline = InProcessPipeline(
        chain,
        layout,
        build_schedule(layout, 2),
        optimizer=KeepGradients,
        options=StageOptions(checkpoint=recompute),
    )
    inputs, labels = torch.randn(2, 6, 4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    pipeline.step(inputs, labels)
    pipeline.evaluate(inputs, labels)
    assert torch.equal(torch.rand(3), expected)
