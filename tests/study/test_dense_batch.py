"""Copies of a dense chain side by side: the gradient of the definition, and the training of a cell per copy."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from mpc_dist.data import Batches, LinearData, TrigonometricData
from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import Chain, ResLinear, ResMLP, build_chain
from mpc_dist.models.residual_mlp import DenseBlock
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.dense_batch import DenseBatch
from mpc_dist.study.dense_cell import DenseCell, scale_branches
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.task import Task
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import Windows, sliding

NUM_BLOCKS = 6
DATA = TrigonometricData(num_train=96, num_test=40)
SETTINGS = {
    "mlp, pool": (ResMLP(NUM_BLOCKS, 7), DATA, "pool"),
    "mlp, project": (ResMLP(NUM_BLOCKS, 5), DATA, "project"),
    "linear, identity": (ResLinear(NUM_BLOCKS, 8), LinearData(num_train=96, num_test=40, dimension=8), "identity"),
}
OTHERS = [
    WindowChoice("loco"),
    WindowChoice("loco", unit=2),
    WindowChoice("cumulative", 3),
    WindowChoice("tumbling", 4),
    WindowChoice("anchored", 2, stride=3),
]


@pytest.fixture
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def all_windows() -> list[Windows]:
    return [sliding(NUM_BLOCKS, h) for h in range(1, NUM_BLOCKS + 1)] + [one.build(NUM_BLOCKS) for one in OTHERS]


def check_gradients(setting: str, windows: list[Windows]) -> None:
    model, source, readout = SETTINGS[setting]
    data = source.load()
    chain = build_chain(model, data.task, readout=readout, seed=2)
    for parameter in chain.parameters():  # biases start at 0, which would hide them
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    inputs, labels = (part.double() for part in next(Batches(data.train, batch_size=16, seed=0)))
    copies = DenseBatch(chain, windows)
    gradients, losses = copies.gradients(inputs, labels)
    assert losses.tolist() == pytest.approx(
        [float(chain.loss(chain(inputs), labels).detach())] * len(windows), rel=1e-12
    )
    for copy, one in enumerate(windows):
        expected = mpc_gradients(chain, inputs, labels, one)
        sizes = [parameter.numel() for parameter in chain.parameters()]
        found = dict(zip(dict(chain.named_parameters()), gradients[copy].split(sizes), strict=True))
        assert set(found) == set(expected)
        for name, value in expected.items():
            scale = float(value.abs().max()) + 1e-300
            assert (found[name].view_as(value) - value).abs().max() <= 1e-12 * scale, f"{name}, windows {copy}"


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_of_all_windows_at_once_equal_the_definition(setting: str):
    check_gradients(setting, all_windows())


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("one", [0, 2, 5, 6, 8, 10])
def test_gradients_of_one_copy_alone_equal_the_definition(one: int):
    check_gradients("mlp, pool", [all_windows()[one]])


def build_cell(**changes: object) -> DenseCell:
    windows = tuple(WindowChoice("sliding", h) for h in (1, 3, NUM_BLOCKS))
    cell = DenseCell(
        ResMLP(NUM_BLOCKS, 7),
        DATA,
        (*windows, WindowChoice("loco")),
        OptimizerConfig("sgd", lr=0.05, scheduler="drop_on_rise"),
        batch_size=16,
        epochs=6,
        seed=3,
        readout="pool",
    )
    return dataclasses.replace(cell, **changes)


def test_each_copy_trains_like_a_cell_of_its_own():
    cell = build_cell(optimizer=OptimizerConfig("sgd", lr=0.3, scheduler="drop_on_rise"), epochs=10)
    result = cell.run()
    assert len(set(result["rate"])) > 1, "each copy has a rate of its own"
    for copy, choice in enumerate(cell.windows):
        alone = TrainingCell(
            cell.model, DATA, choice, cell.optimizer, 16, 60, 3, ReadoutConfig("pool"), num_evaluations=10
        ).run()
        # Single precision over 60 steps, in another order of summation; and six digits are kept.
        assert result["train"][copy] == pytest.approx(alone["train"][1:], rel=2e-4)
        assert result["test"][copy] == pytest.approx(alone["test"], rel=2e-4)


class Scaled(torch.nn.Module):
    """x + c * relu(W x + b), with the factor in the model."""

    def __init__(self, block: DenseBlock, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = block.linear, factor

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + self.factor * self.linear(state).relu()


def test_a_factor_in_the_model_is_small_weights_that_learn_slower():
    factor = 0.25
    cell = build_cell(branch_scale=factor, optimizer=OptimizerConfig("sgd", lr=0.1))
    data = DATA.load()
    plain = build_chain(cell.model, data.task, readout="pool", seed=3)
    blocks = [Scaled(b, factor) if isinstance(b, DenseBlock) and b.residual else b for b in plain.blocks]
    chain = Chain(blocks, plain.loss, {int(s): readout for s, readout in plain.readouts.items()})
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    batches = Batches(data.train, batch_size=16, seed=3)
    named = dict(chain.named_parameters())
    for _ in range(6 * 6):
        inputs, labels = next(batches)
        for name, gradient in mpc_gradients(chain, inputs, labels, sliding(NUM_BLOCKS, 3)).items():
            named[name].grad = gradient
        optimizer.step()
    inputs, labels = next(Batches(data.test, batch_size=40, seed=0, shuffle=False))
    assert cell.run()["test"][1][-1] == pytest.approx(float(chain.loss(chain(inputs), labels).detach()), rel=2e-4)
    at_start = dataclasses.replace(cell, learns_scaled=False).run()["test"][1]
    assert at_start[0] == cell.run()["test"][1][0]
    assert at_start[-1] != pytest.approx(cell.run()["test"][1][-1], rel=1e-2)


def test_a_trained_copy_can_be_read_back():
    data = DATA.load()
    chain = build_chain(ResMLP(NUM_BLOCKS, 7), data.task, readout="pool", seed=3)
    copies = DenseBatch(chain, all_windows())
    inputs, labels = next(Batches(data.train, batch_size=16, seed=0))
    gradients, _ = copies.gradients(inputs, labels)
    copies.parameters.sub_(0.05 * gradients)
    losses = copies.losses(inputs, labels)
    for copy in (0, 4):
        copies.load(chain, copy)
        assert float(losses[copy]) == pytest.approx(float(chain.loss(chain(inputs), labels).detach()), rel=1e-5)


def test_a_copy_that_diverges_leaves_the_others_alone():
    cell = build_cell(optimizer=OptimizerConfig("sgd", lr=0.05))
    calm = cell.run()
    chain = build_chain(cell.model, DATA.load().task, readout="pool", seed=3)
    copies = DenseBatch(chain, [sliding(NUM_BLOCKS, 1), sliding(NUM_BLOCKS, 3)])
    copies.parameters[0] = torch.nan
    gradients, losses = copies.gradients(*next(Batches(DATA.load().train, batch_size=16, seed=3)))
    assert torch.isnan(losses).tolist() == [True, False]
    assert torch.isfinite(gradients[1]).all()
    wild = dataclasses.replace(cell, optimizer=OptimizerConfig("sgd", lr=1e6)).run()
    assert wild["train"][0][-1] is None
    assert calm["train"][0][-1] is not None


def test_what_has_no_fast_path_is_refused():
    with pytest.raises(ValueError, match="plain sgd"):
        build_cell(optimizer=OptimizerConfig("adamw"))
    data = DATA.load()
    with pytest.raises(ValueError, match="readout at boundary 1 is trained"):
        DenseBatch(build_chain(ResMLP(3, 5), data.task, readout="local"), [sliding(3, 1)])
    with pytest.raises(ValueError, match="2 blocks or more"):
        DenseBatch(build_chain(ResMLP(1, 5), data.task, readout="pool"), [sliding(1, 1)])
    digits = Task("classification", (1, 8, 8), 10)
    with pytest.raises(ValueError, match="dense blocks only, got Sequential"):
        DenseBatch(build_chain(ResMLP(3, 10), digits, readout="identity"), [sliding(3, 1)])


def test_only_residual_weights_are_scaled():
    chain = build_chain(ResMLP(4, 5), DATA.load().task, readout="pool", seed=0)
    before = [block.linear.weight.clone() for block in chain.blocks]
    scale_branches(chain, 0.5)
    ratios = [
        float((block.linear.weight / old).detach().mean()) for block, old in zip(chain.blocks, before, strict=True)
    ]
    assert ratios == pytest.approx([1, 0.5, 0.5, 1])
