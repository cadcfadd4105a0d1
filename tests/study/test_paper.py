"""The paper's angle, memory and theory experiments: small variants end to end, and the formulas that they rest on."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mpc_dist.data import LinearData, TrigonometricData
from mpc_dist.gradient import HeldBlock, mpc_gradients
from mpc_dist.models import HuggingFace, ResLinear, ResMLP, ResNetCifar, build_chain
from mpc_dist.profile import SavedBytes, measure_memory
from mpc_dist.profile.blocks import without_allocating
from mpc_dist.readout import ReadoutConfig
from mpc_dist.study import angle, memory, theory, theory_findings
from mpc_dist.study.cell import Cell, Record, Store
from mpc_dist.study.deep_linear import AllResidual, DeepLinearCell
from mpc_dist.study.experiment import Experiment, write_page
from mpc_dist.study.memory import BlockBytes, MemoryCell
from mpc_dist.study.order import fit_order, order_near_end
from mpc_dist.study.paper_tasks import LINEAR, MLP, PaperTask
from mpc_dist.study.training_cell import TrainingCell, WindowChoice
from mpc_dist.task import Task
from mpc_dist.training.sections import OptimizerConfig
from mpc_dist.windows import sliding

VECTORS, IMAGES = Task("regression", (4,), 4), Task("classification", (3, 8, 8), 10)


def run_here(cells: dict[str, Cell], path: Path) -> dict[str, Record]:
    """All cells in this process: starting others takes longer than these tiny ones."""
    store = Store(path)
    for name, cell in cells.items():
        store.add(name, cell, cell.run(), seconds=0.0)
    return {name: store.find(cell) for name, cell in cells.items()}


def tiny(task: PaperTask, model: object) -> PaperTask:
    data = (LinearData if task.model.name != "res_mlp" else TrigonometricData)(num_train=200, num_test=50)
    return PaperTask(task.title, model, data, task.readout, task.optimizer, 20, batches_per_epoch=10)


def tiny_tasks() -> tuple[PaperTask, ...]:
    return (
        tiny(LINEAR, ResLinear(6, 10, init_scale=1 / 6)),
        tiny(angle.ALL_RESIDUAL, AllResidual(6)),
        tiny(MLP, ResMLP(6, 10, init_scale=1 / 6)),
    )


def build_tiny_angle() -> dict[str, Cell]:
    return angle.build_from([angle.Size(task, (0, 0.5, 1), 2) for task in tiny_tasks()])


def build_tiny_memory() -> dict[str, Cell]:
    deep = Task("classification", (3, 32, 32), 10)
    overrides = {"num_labels": 10, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return {
        "linear residual net": memory.Size("", ResLinear(5, 4), VECTORS, "identity", 3).build_cell(),
        "ResNet-50": memory.Size(
            "", HuggingFace(architecture="resnet", overrides=overrides), deep, "local", 2, 3
        ).build_cell(),
    }


def build_tiny_theory() -> dict[str, Cell]:
    return theory.build_from(theory.Size((16,), 2, tiny_tasks(), 2, steps=20, most_horizons=3))


@pytest.mark.parametrize(
    ("experiment", "build"),
    [
        (angle.EXPERIMENT, build_tiny_angle),
        (memory.EXPERIMENT, build_tiny_memory),
        (theory_findings.EXPERIMENT, build_tiny_theory),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_tiny_variant_runs_and_writes_its_page(
    experiment: Experiment, build: Callable[[], dict[str, Cell]], tmp_path: Path
):
    records = run_here(build(), tmp_path / "cells.jsonl")
    findings = experiment.conclude(records)
    text = write_page(experiment, findings, records, tmp_path, quick=True).read_text()
    assert len(findings.verdicts) >= 3
    for verdict in findings.verdicts:
        assert f"| **{verdict.verdict}** |" in text
        assert any(character.isdigit() for character in verdict.evidence)
    for picture in findings.pictures:
        assert (tmp_path / f"{picture.name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("experiment", [angle.EXPERIMENT, memory.EXPERIMENT, theory_findings.EXPERIMENT])
@pytest.mark.parametrize("quick", [True, False])
def test_cells_of_both_variants_have_at_least_three_seeds_where_the_task_is_synthetic(experiment, quick):
    cells = experiment.build_cells(quick)
    seeds: dict[str, set[int]] = {}
    for name, cell in cells.items():
        if isinstance(cell, TrainingCell | DeepLinearCell) and not isinstance(getattr(cell, "model", 0), ResNetCifar):
            seeds.setdefault(name.rpartition(", seed")[0], set()).add(cell.seed)
    assert all(len(found) >= 3 for found in seeds.values())


def test_the_order_of_a_power_law_is_its_exponent_and_noise_is_left_out():
    distances = [1, 2, 3, 4, 5]
    assert fit_order(distances, [1e-4 * d**2.5 for d in distances]) == pytest.approx(2.5)
    assert fit_order(distances, [1e-14, *(1e-4 * d**3 for d in distances[1:])]) == pytest.approx(3)
    assert math.isnan(fit_order([1, 2], [1.0, 2.0]))
    depth = 15
    assert order_near_end([1e-4 * (depth - h) ** 3 for h in range(1, depth + 1)]) == pytest.approx(3)


def test_a_deep_linear_cell_measures_the_angle_of_the_definition():
    cell = DeepLinearCell(num_blocks=8, relation="smooth", norm=0.3, width=4, seed=1)
    gaps = cell.run()["angle_gaps"]
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    weights = torch.eye(4, dtype=torch.float64) + cell.draw(generator) / 8
    model = build_chain(AllResidual(8), VECTORS).double()
    for block, weight in zip(model.blocks, weights, strict=True):
        block.linear.weight.data.copy_(weight - torch.eye(4))

    def flat(horizon: int) -> torch.Tensor:
        inputs = torch.eye(4, dtype=torch.float64)
        return torch.cat([g.flatten() for g in mpc_gradients(model, inputs, target, sliding(8, horizon)).values()])

    exact = flat(8)
    expected = [1 - float(flat(h) @ exact / flat(h).norm() / exact.norm()) for h in range(1, 9)]
    np.testing.assert_allclose(gaps, expected, rtol=1e-5, atol=1e-13)  # six digits are kept


@pytest.mark.parametrize("relation", ["one for all", "smooth", "independent"])
def test_perturbations_have_the_norm_that_was_asked_for(relation):
    drawn = DeepLinearCell(6, relation, 0.3, 5, 0).draw(torch.Generator().manual_seed(0))
    assert drawn.shape == (6, 5, 5)
    np.testing.assert_allclose(torch.linalg.matrix_norm(drawn, 2), 0.3)
    assert torch.equal(drawn[0], drawn[5]) is (relation == "one for all")


def test_related_layers_have_cubic_order_and_independent_ones_do_not():
    orders = {
        relation: np.mean(
            [theory.deep_linear_order(DeepLinearCell(32, relation, 0.3, 10, s).run()["angle_gaps"]) for s in range(3)]
        )
        for relation in ("one for all", "independent")
    }
    # A tenth is several standard deviations of the first (0.01 over seeds); the second scatters (0.13 each).
    assert orders["one for all"] == pytest.approx(theory.counted_order(32, power=2), abs=0.1)
    assert orders["independent"] < theory.counted_order(32, power=2) - 0.3
    assert theory.counted_order(10_000, power=2) == pytest.approx(3, abs=0.01)  # a sum nears its integral
    assert theory.counted_order(10_000, power=1) == pytest.approx(2, abs=0.01)


def test_a_net_of_residual_layers_refuses_data_that_changes_the_space():
    with pytest.raises(ValueError, match="maps a space to itself"):
        build_chain(AllResidual(3), Task("regression", (1,), 4))


def test_initial_weights_of_residual_layers_alone_are_scaled():
    plain, scaled = (build_chain(ResMLP(4, 4, init_scale=scale), VECTORS) for scale in (1.0, 0.25))
    for t, (one, other) in enumerate(zip(plain.blocks, scaled.blocks, strict=True)):
        factor = 0.25 if t in (1, 2) else 1.0
        assert torch.equal(factor * one.linear.weight, other.linear.weight)
    with pytest.raises(ValueError, match="init_scale"):
        ResMLP(4, 4, init_scale=-1)


@pytest.mark.parametrize(
    ("model", "task", "readout"),
    [
        (ResMLP(5, 6), Task("regression", (1,), 4), "pool"),
        (ResNetCifar(blocks_per_group=2, channels=4), IMAGES, "pool"),
    ],
    ids=["mlp", "resnet"],
)
class TestBytesWithoutAllocating:
    """What a memory cell counts with fake tensors, against real ones."""

    def draw(self, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randn(3, task.num_outputs) if task.kind == "regression" else torch.randint(10, (3,))
        return torch.randn(3, *task.input_shape), labels

    def test_they_are_those_of_a_real_sweep(self, model, task, readout):
        every = range(1, model.num_blocks + 1)
        result = MemoryCell(model, task, readout, 3, tuple(every)).run()
        real = measure_memory(build_chain(model, task, readout=readout), *self.draw(task), horizons=every)
        assert result["held"] == {str(h): size for h, size in real.items()}

    def test_the_largest_run_of_blocks_is_what_the_eager_sweep_holds(self, model, task, readout):
        every = range(1, model.num_blocks + 1)
        result = MemoryCell(model, task, readout, 3, tuple(every)).run()
        parts = BlockBytes(result["blocks"], result["shared"], result["readouts"])
        for h in every:
            assert parts.eager(h) == pytest.approx(result["held"][str(h)], rel=0.02)  # scalars of a loss

    def test_the_static_variant_is_every_window_held_at_once(self, model, task, readout):
        chain, (inputs, labels) = build_chain(model, task, readout=readout), self.draw(task)
        result = MemoryCell(model, task, readout, 3, (1,)).run()
        parts = BlockBytes(result["blocks"], result["shared"], result["readouts"])
        states = [inputs]
        with torch.no_grad():
            for block in chain.blocks:
                states.append(block(states[-1]))
        for h in (1, 2, model.num_blocks):
            graphs = []
            windows = sliding(model.num_blocks, h)
            with SavedBytes([*chain.parameters(), *chain.buffers(), inputs, labels]) as count:
                for readout_at in windows.readouts:
                    first = windows.stop_of(readout_at)
                    # Every window has a copy of its first state: its graph is its own.
                    state = states[first].clone() if first else inputs
                    for t, block in enumerate(chain.blocks[first:readout_at], start=first):
                        graphs.append(HeldBlock.run(block, state, t))
                        state = graphs[-1].output.detach()
                    graphs.append(chain.loss_at(readout_at, state.requires_grad_(), labels))
                held = count.live
            assert parts.static(h) == pytest.approx(held, rel=0.05)  # scalars of a loss, as many as windows
            del graphs


def test_equal_blocks_of_a_static_graph_hold_h_times_the_number_of_windows():
    parts = BlockBytes([7] * 9, [0] * 9, [0] * 9)
    assert [parts.static(h) for h in range(1, 10)] == [7 * h * (9 - h + 1) for h in range(1, 10)]
    assert [parts.eager(h) for h in range(1, 10)] == [7 * h for h in range(1, 10)]


def test_a_vit_is_built_of_shapes_alone():
    task = Task("classification", (3, 224, 224), 7)
    with without_allocating():
        chain = build_chain(HuggingFace(architecture="vit", overrides={"num_labels": 7, "num_hidden_layers": 2}), task)
    assert [tuple(p.shape) for p in chain.readouts["2"].linear.parameters()] == [(7, 768), (7,)]


def test_the_closed_form_is_the_minimum_and_the_printed_form_is_not():
    depth, factor = 200, 0.8
    squares = 1 - factor * (1 - np.arange(1, depth + 1) / depth) ** 3
    for share in (0.1, 0.3, 0.6):
        found = theory.choose("exact", squares, np.arange(1, depth + 1) / depth, share)
        assert found.factor == pytest.approx(factor)
        assert abs(found.closed - found.best) <= 1
        assert found.regret < 1e-3
        assert found.error(found.printed) > 0.15


def test_the_relative_rate_is_one_for_back_propagation_and_none_for_a_run_that_blew_up():
    assert theory.relative_rate(0.1, start=1.0, full=0.1) == pytest.approx(1)
    assert theory.relative_rate(1.0, start=1.0, full=0.1) == 0
    assert theory.relative_rate(10.0, start=1.0, full=0.1) == pytest.approx(-1)
    assert math.isnan(theory.relative_rate(math.nan, start=1.0, full=0.1))


def test_a_training_cell_keeps_the_digits_of_small_angles_and_survives_weights_that_are_no_numbers():
    model = ResLinear(5, 10, init_scale=1e-4)
    data = LinearData(num_train=100, num_test=20)
    settings = (WindowChoice("backprop"), OptimizerConfig("sgd", lr=1e9), 20, 4, 0, ReadoutConfig("identity"))
    result = TrainingCell(model, data, *settings, num_evaluations=1, angles_at=(0, 3)).run()
    assert list(result["angle_gaps"]) == ["0"]
    cosines = np.array(result["cosines"]["0"])
    # Six digits are kept of the one, nine of the other.
    np.testing.assert_allclose(1 - cosines, result["angle_gaps"]["0"], rtol=5e-6, atol=1e-9)
    assert len(cosines) == 5
