"""The windows experiment: its linear model against algebra and the definition, and its tiny variant end to end."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpc_dist.data import TextData
from mpc_dist.gradient import mpc_gradients
from mpc_dist.models import Chain
from mpc_dist.study import readouts, windows
from mpc_dist.study.cell import Store
from mpc_dist.study.chain_modes import build_dynamics, draw_kernels, longest_chain_at_zero, simulate_drift
from mpc_dist.study.experiment import Experiment, write_page
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.study.tuned_cell import TunedCell, reached_loss
from mpc_dist.study.window_settings import ADAMW, LOCAL, Scale
from mpc_dist.study.window_settings import build_cells as build_window_cells
from mpc_dist.study.window_verdicts import Outcome, rank_correlation
from mpc_dist.windows import Windows, backprop, cumulative, sliding, tumbling


class Add(nn.Module):
    """Adds its weights: a block in function space with the identity as its kernel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(size, dtype=torch.float64))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Return the next state."""
        return state + self.u


@pytest.mark.parametrize(
    "aims", [sliding(5, 2), tumbling(5, 2), cumulative(5, 3), backprop(5)], ids=lambda w: str(w.targets)
)
def test_the_models_dynamics_are_those_of_the_definition(aims: Windows):
    size = 3
    torch.manual_seed(0)
    blocks = [Add(size) for _ in range(5)]
    chain = Chain(blocks, lambda prediction, labels: 0.5 * (prediction - labels).square().sum())
    inputs, labels = torch.randn(2, size, dtype=torch.float64)

    def errors() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([inputs + sum(block.u for block in blocks[:s]) - labels for s in range(1, 6)])

    before, rate = errors(), 0.1
    gradients = mpc_gradients(chain, inputs, labels, aims)
    with torch.no_grad():
        for t, block in enumerate(blocks):
            block.u -= rate * gradients[f"blocks.{t}.u"]
    matrix = build_dynamics(aims, [np.eye(size)] * 5, boundaries=range(1, 6))
    expected = before.numpy() - rate * matrix @ before.numpy()
    np.testing.assert_allclose(errors().numpy(), expected, rtol=1e-12)


def test_a_jordan_chain_is_found_exactly():
    block = np.diag([1.0, 1.0], k=1)  # one chain of three
    assert longest_chain_at_zero(block) == 3
    assert longest_chain_at_zero(np.zeros((2, 2))) == 1
    assert longest_chain_at_zero(np.array([[2.0, 1.0], [0.0, 3.0]])) == 0


def chain_of(aims: Windows) -> int:
    return longest_chain_at_zero(build_dynamics(aims, [np.eye(1)] * aims.num_blocks, boundaries=aims.readouts))


def test_only_sliding_windows_between_the_ends_leave_modes_undamped():
    assert [chain_of(sliding(8, h)) for h in range(1, 9)] == [0, 3, 2, 1, 1, 1, 0, 0]
    assert [chain_of(tumbling(8, g)) for g in (2, 3, 4)] == [0, 0, 0]
    assert [chain_of(cumulative(8, h)) for h in (2, 4)] == [0, 0]
    assert chain_of(WindowChoice("near", 2, near_weight=0.1).build(8)) == 0


def test_whatever_the_kernels_local_and_tumbling_windows_have_no_growing_mode():
    kernels = draw_kernels(8, np.random.default_rng(0))
    for aims in (sliding(8, 1), tumbling(8, 2), backprop(8)):
        matrix = build_dynamics(aims, kernels, boundaries=aims.readouts)
        assert np.linalg.eigvals(matrix).real.min() > -1e-3  # defective for h = 1: rounding spreads its eigenvalues
    grows = build_dynamics(sliding(8, 2), kernels, boundaries=sliding(8, 2).readouts)
    assert np.linalg.eigvals(grows).real.min() < -0.01


def test_noise_makes_the_errors_of_sliding_windows_drift():
    kernels = draw_kernels(8, np.random.default_rng(1))
    far, local, group = (
        simulate_drift(aims, kernels, np.random.default_rng(1))
        for aims in (sliding(8, 2), sliding(8, 1), tumbling(8, 2))
    )
    assert far > 1.5 * local > 1.5 * group


def test_a_tuned_cell_takes_the_rate_that_learns():
    training = next(iter(readouts.build_cells(TINY).values())).tuned.training
    cell = TunedCell(TrainingCell(**{**vars(training), "steps": 6, "optimizer": ADAMW}), (1e-9, 1e-2), seeds=(0,))
    result = cell.run()
    assert result["rate"] == 1e-2
    assert result["tuning"]["0.01"] < result["tuning"]["1e-09"]
    assert len(result["runs"]) == 1
    assert reached_loss({"train": [1.0], "steps": [3]}, 6) == float("inf")


def test_better_means_more_than_the_seeds_spread():
    assert Outcome(1, (1.0, 1.1)).is_better_than(Outcome(1, (2.0, 2.1)))
    assert not Outcome(1, (1.0, 2.0)).is_better_than(Outcome(1, (1.5, 2.5)))
    assert not Outcome(1, (1.0,)).is_better_than(Outcome(1, (1.005,)))
    assert Outcome(1, (1.0, 1.0)).is_better_than(Outcome(1, (float("inf"), 1.0)))
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


TINY = Scale(
    gpt_steps=2,
    mlp_steps=2,
    resnet_steps=2,
    seeds=(0,),
    num_rates=1,
    num_evaluations=1,
    gpt_width=4,
    num_draws=1,
    text=TextData(context=8, max_bytes=20_000, test_fraction=0.02),
)


@pytest.mark.parametrize(
    ("experiment", "build", "figures"),
    [
        (windows.WINDOWS, build_window_cells, ["drift", "losses", "modes", "prediction"]),
        (readouts.READOUTS, readouts.build_cells, ["readouts"]),
    ],
    ids=["windows", "readouts"],
)
def test_the_tiny_variant_runs_and_writes_its_page(tmp_path: Path, experiment: Experiment, build, figures: list[str]):
    store = Store(tmp_path / "cells.jsonl")
    cells: Mapping = build(TINY)
    for name, cell in cells.items():
        store.add(name, cell, cell.run(), seconds=0.1)
    records = {name: store.find(cell) for name, cell in cells.items()}
    findings = experiment.conclude(records)
    page = write_page(experiment, findings, records, tmp_path, quick=True).read_text()
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == figures
    assert all(verdict.evidence in page.replace("\\|", "|") for verdict in findings.verdicts)


def test_the_cost_of_heads_counts_what_windows_read():
    cells = readouts.build_cells(TINY)
    cost = {
        name: readouts.count_cost(cells[f"GPT, {w}: {name}"].tuned.training)
        for w, name in ((LOCAL, "local"), (LOCAL, "project"), (LOCAL, "local, hidden layer"))
    }
    vocabulary, width, tokens = 256, 4, 8
    assert cost["local"]["readouts parameters"] == 7 * (vocabulary * width + 2 * width)
    assert cost["local"]["readouts flops"] == 7 * 3 * 2 * tokens * width * vocabulary
    assert cost["project"]["readouts parameters"] == 0
    assert cost["project"]["readouts flops"] == cost["local"]["readouts flops"] * 2 // 3
    assert cost["local, hidden layer"]["readouts flops"] > cost["local"]["readouts flops"]
