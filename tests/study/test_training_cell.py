"""A training cell is the trainer's own gradient and update, in one process."""

from itertools import islice

import pytest
import torch

from mpc_dist.data import Batches, TrigonometricData
from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import ResMLP, build_chain
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.training.optimizer import build_optimizer
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import backprop, cumulative, loco, sliding, tumbling

MODEL = ResMLP(num_blocks=5, width=6)
DATA = TrigonometricData(num_train=64, num_test=20)


def build_cell(choice: WindowChoice, **changes: object) -> TrainingCell:
    settings = {
        "optimizer": OptimizerConfig("sgd", lr=0.05, momentum=0.9),
        "batch_size": 16,
        "steps": 8,
        "seed": 3,
        "readout": ReadoutConfig("pool"),
        "num_evaluations": 2,
    }
    return TrainingCell(MODEL, DATA, choice, **{**settings, **changes})


@pytest.mark.parametrize(
    ("choice", "windows"),
    [
        (WindowChoice("sliding", 2), sliding(5, 2)),
        (WindowChoice("tumbling", 2), tumbling(5, 2)),
        (WindowChoice("backprop"), backprop(5)),
    ],
    ids=str,
)
def test_it_trains_as_the_definition_says(choice: WindowChoice, windows: object):
    cell = build_cell(choice)
    result = cell.run()
    data = DATA.load()
    chain = build_chain(MODEL, data.task, readout="pool", seed=3)
    optimizer = build_optimizer(cell.optimizer, [p for p in chain.parameters() if p.requires_grad], blocks=chain.blocks)
    named = dict(chain.named_parameters())
    for inputs, labels in islice(Batches(data.train, batch_size=16, seed=3), 8):
        for name, gradient in mpc_gradients(chain, inputs, labels, windows).items():
            named[name].grad = gradient
        optimizer.step()
    inputs, labels = next(Batches(data.test, batch_size=20, seed=0, shuffle=False))
    with torch.no_grad():
        state = inputs
        for block in chain.blocks:
            state = block(state)
        expected = float(chain.loss_at(5, state, labels))
    assert result["steps"] == [0, 4, 8]
    assert result["test"][-1] == pytest.approx(expected, rel=1e-5)  # six digits are kept


def test_windows_for_any_depth():
    assert WindowChoice("cumulative", 2).build(4) == cumulative(4, 2)
    near = WindowChoice("near", 2, near_weight=0.25).build(3)
    assert near.targets == (((1, 0.25), (2, 1.0)), ((2, 0.25), (3, 1.0)), ((3, 1.25),))
    assert WindowChoice("loco").build(4) == loco(4)
    assert WindowChoice("anchored", 2, stride=2).build(5) == sliding(5, 2, [2, 4, 5])
    assert [aims[0][0] for aims in WindowChoice("tumbling", 1, unit=2).build(5).targets] == [2, 2, 4, 4, 5]


def test_the_same_cell_gives_the_same_result_and_angles_where_asked():
    cell = build_cell(WindowChoice("sliding", 2), angles_at=(0, 8))
    first, again = cell.run(), cell.run()
    assert first == again
    assert set(first["cosines"]) == {"0", "8"}
    assert first["cosines"]["0"][-1] == pytest.approx(1.0)


def test_losses_inside_are_kept_where_they_are_aimed_at():
    result = build_cell(WindowChoice("tumbling", 2), watches_interior=True).run()
    assert set(result["interior"]) == {"0", "4", "8"}
    seen = result["interior"]["8"]
    assert (len(seen["losses"]), len(seen["sizes"])) == (3, 5)  # groups end at 2, 4 and 5
    assert seen["losses"][-1] == pytest.approx(result["test"][-1], rel=1e-5)  # six digits are kept


def test_a_run_that_diverges_ends_there():
    result = build_cell(
        WindowChoice("backprop"), optimizer=OptimizerConfig("sgd", lr=1e9), num_evaluations=8, steps=8
    ).run()
    assert len(result["steps"]) < 9
