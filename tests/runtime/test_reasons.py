"""What cannot be trained, of a user's blocks, readouts and loss: one line with block, value and remedy, at start-up."""

import pytest
import torch
from torch import Tensor, nn

from mpc_dist.readout import mean_squared_error
from mpc_dist.runtime import StageOptions, build_pipeline
from mpc_dist.windows import backprop, sliding
from tests.runtime.reference import KeepGradients


class Detaching(nn.Linear):
    def forward(self, state: Tensor) -> Tensor:
        return super().forward(state).detach()


class Deaf(nn.Linear):
    """Its output has a graph, of its weights alone."""

    def forward(self, state: Tensor) -> Tensor:
        return super().forward(state.detach())


class Clamping(nn.Linear):
    def forward(self, state: Tensor) -> Tensor:
        self.weight.clamp_(-1, 1)
        return super().forward(state)


class Counting(nn.Linear):
    def forward(self, state: Tensor) -> Tensor:
        return super().forward(state).round().long()


class Two(nn.Linear):
    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(state), state


class Blind(nn.Linear):
    """A readout that looks at its weights alone."""

    def forward(self, state: Tensor) -> Tensor:
        return self.weight.expand(len(state), *self.weight.shape).mean(1)


CUT_OFF = r"block 1 \(Detaching\) gives a state that is cut off from its input .* return the state as computed"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Detaching(4, 4), CUT_OFF),
        (Deaf(4, 4), CUT_OFF.replace("Detaching", "Deaf")),
        (Clamping(4, 4), r"block 1 \(Clamping\) modifies its input in place, or a weight of its own; make that .*"),
        (
            Counting(4, 4),
            r"block 1 \(Counting\) gives states of type torch.int64, through which no adjoint can pass; .*",
        ),
        (Two(4, 4), r"block 1 \(Two\) returns a tuple; a block gives one tensor: .*"),
        (
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
            r"block 1 \(Sequential\) modifies its input in place, or a weight of its own; make that .*",
        ),
    ],
)
def test_a_block_that_cannot_be_trained_is_named_before_the_first_step(odd, message, split, recompute):
    blocks = [nn.Linear(4, 4), odd, nn.Linear(4, 4)]
    pipeline = build_pipeline(
        blocks,
        mean_squared_error,
        horizon=sliding(3, 2),
        optimizer=KeepGradients,
        split=split,
        options=StageOptions(checkpoint=recompute),
    )
    with pytest.raises(ValueError, match=f"^{message}$") as caught:
        pipeline.connect(torch.randn(2, 4), torch.randn(2, 4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("readout", "loss"),
    [
        (Blind(4, 4), mean_squared_error),
        (nn.Linear(4, 4), lambda _, labels: labels.mean()),
        (nn.Linear(4, 4), lambda prediction, _: prediction.detach().mean()),
    ],
    ids=["readout without the state", "loss without the prediction", "detached loss"],
)
def test_a_loss_that_ignores_the_state_is_named(readout, loss):
    pipeline = build_pipeline(
        [nn.Linear(4, 4)], loss, horizon=1, optimizer=KeepGradients, readouts={1: readout}, num_microbatches=2
    )
    with pytest.raises(ValueError, match="the loss read after block 0 does not depend on the block's state"):
        pipeline.connect(torch.randn(2, 4), torch.randn(2, 4))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("windows", [backprop(3), sliding(3, 1), sliding(3, 2)])
def test_blocks_that_pass_their_input_on_train_as_plain_torch_does(windows, split):
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    inputs, labels = torch.randn(2, 6, 4)
    pipeline = build_pipeline(
        [linear, nn.Identity(), nn.Identity()],
        mean_squared_error,
        horizon=windows,
        optimizer=KeepGradients,
        split=split,
    )
    pipeline.step(inputs, labels)
    (expected,) = torch.autograd.grad(nn.functional.mse_loss(linear(inputs), labels), [linear.weight])
    torch.testing.assert_close(linear.weight.grad, expected)


def test_start_up_leaves_weights_statistics_gradients_and_the_generator_as_they_were():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {key: value.clone() for key, value in block.state_dict().items()}
    pipeline = build_pipeline([block], mean_squared_error, horizon=1, optimizer=KeepGradients)
    inputs, labels = torch.randn(2, 6, 4)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    pipeline.connect(inputs, labels)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())
    assert all(parameter.grad is None for parameter in block.parameters())


def test_tied_weights_are_refused():
    tied = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"blocks\.2\.weight is the same parameter as blocks\.0\.weight; .* untie them"
    ):
        build_pipeline([tied, nn.Linear(4, 4), tied], mean_squared_error, horizon=1, optimizer=KeepGradients)
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ValueError, match=r"readouts\.2\.weight is the same parameter as blocks\.0\.weight"):
        build_pipeline(
            blocks, mean_squared_error, horizon=backprop(2), optimizer=KeepGradients, readouts={2: blocks[0]}
        )


def test_a_missing_readout_is_named():
    with pytest.raises(ValueError, match=r"aim at boundaries \[1\], which have no readout"):
        build_pipeline(
            [nn.Linear(4, 4), nn.Linear(4, 4)],
            mean_squared_error,
            horizon=sliding(2, 1),
            optimizer=KeepGradients,
            readouts={2: nn.Linear(4, 4)},
        )


def test_a_batch_that_a_rank_needs_may_not_be_left_out():
    pipeline = build_pipeline([nn.Linear(4, 4)], mean_squared_error, horizon=1, optimizer=KeepGradients)
    with pytest.raises(ValueError, match="stage 0 needs a batch's labels, got None"):
        pipeline.step(torch.randn(2, 4), None)


def test_the_first_block_may_keep_the_data_out_of_its_graph_but_not_its_weights():
    """Nobody needs the adjoint of the data."""
    inputs, labels = torch.randn(2, 4), torch.randn(2, 4)
    for first, is_fine in ((Deaf(4, 4), True), (Detaching(4, 4), False)):
        pipeline = build_pipeline(
            [first, nn.Linear(4, 4)], mean_squared_error, horizon=backprop(2), optimizer=KeepGradients
        )
        if is_fine:
            pipeline.step(inputs, labels)
            assert first.weight.grad is not None
        else:
            with pytest.raises(ValueError, match=r"block 0 \(Detaching\) gives a state that is cut off"):
                pipeline.step(inputs, labels)
