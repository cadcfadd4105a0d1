"""The experiments `horizons` and `selection`, tiny: they run end to end, and their verdicts follow from the numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from mpc_dist.data import Batches, LinearData, TrigonometricData
from mpc_dist.models import Chain, ResLinear, ResMLP, ResNetCifar, build_chain
from mpc_dist.profile import measure_angles
from mpc_dist.study import horizons, selection
from mpc_dist.study.cell import Cell, Record, Store
from mpc_dist.study.curve_cell import scale_profile
from mpc_dist.study.dense_cell import DenseCell, scale_branches
from mpc_dist.study.experiment import Experiment, write_page
from mpc_dist.study.horizon_curves import Curves, relative_rate, share_of_falling_pairs
from mpc_dist.study.horizon_figures import choose_lines
from mpc_dist.study.horizon_verdicts import grade, judge
from mpc_dist.study.selection_score import relative
from mpc_dist.study.step_time_cell import StepTimeCell
from tests.study.test_dense_batch import Scaled

SMALL = (
    horizons.DenseTask(ResLinear(5, 4), LinearData(num_train=400, num_test=50, dimension=4), "identity", 0.03),
    horizons.DenseTask(ResMLP(5, 5), TrigonometricData(num_train=400, num_test=50), "pool", 0.01),
)
TASKS = (
    horizons.DenseTask(ResLinear(15, 4), LinearData(num_train=400, num_test=50, dimension=4), "identity", 0.03),
    horizons.DenseTask(ResMLP(15, 5), TrigonometricData(num_train=400, num_test=50), "pool", 0.01),
)


def is_synthetic(cell: Cell) -> bool:
    return not isinstance(getattr(cell, "model", None), ResNetCifar)


def run(experiment: Experiment, cells: dict[str, Cell], folder: Path) -> str:
    store = Store(folder / "cells.jsonl")
    for name, cell in cells.items():
        store.add(name, cell, cell.run(), seconds=1.0)
    kept = Store(folder / "cells.jsonl")  # what conclude sees is what was written
    records: dict[str, Record] = {name: record for name, cell in cells.items() if (record := kept.find(cell))}
    page = write_page(experiment, experiment.conclude(records), records, folder, quick=True)
    return page.read_text()


def test_horizons_tiny(tmp_path: Path):
    sizes = horizons.Sizes(SMALL, 2, 2, ResNetCifar(blocks_per_group=1, channels=2), (1, 2, 3), 10, 1, 1)
    cells = {name: cell for name, cell in horizons.build_cells(sizes).items() if is_synthetic(cell)}
    text = run(horizons.HORIZONS, cells, tmp_path)
    assert text.count("confirmed**") + text.count("limits**") == 6
    for picture in ("loss-by-horizon", "loss-by-epoch", "step-time"):
        assert (tmp_path / f"{picture}.png").stat().st_size > 10_000
        assert f"({picture}.png)" in text
    assert "400 samples, batches of 100, 2 epochs, 2 seeds" in text


def test_selection_tiny(tmp_path: Path):
    settings = tuple(
        selection.Setting(task, 2, learns_scaled) for task, learns_scaled in zip(TASKS, (True, False), strict=True)
    )
    sizes = selection.Sizes(settings, 1, ResNetCifar(blocks_per_group=5, channels=2), (1, 15), 4)
    cells = {name: cell for name, cell in selection.build_cells(sizes).items() if is_synthetic(cell)}
    text = run(selection.SELECTION, cells, tmp_path)
    assert text.count("confirmed**") + text.count("limits**") == 4
    assert (tmp_path / "selection.png").stat().st_size > 10_000
    assert "| linear, O1, eps 0.05 |" in text


def test_the_full_sizes_are_the_papers():
    cells = horizons.build_cells(horizons.FULL)
    trained = [cell for cell in cells.values() if isinstance(cell, DenseCell) and cell.branch_scale != 1]
    facts = {(c.model.name, c.optimizer.lr, c.batch_size, c.epochs, c.data.num_train, len(c.windows)) for c in trained}
    assert facts == {("res_linear", 0.03, 100, 40, 10_000, 15), ("res_mlp", 0.01, 100, 40, 100_000, 15)}
    assert {c.seed for c in trained} == {0, 1, 2}


def test_simulated_times_are_the_known_ones():
    cell = StepTimeCell(ResMLP(8, 5), TrigonometricData(num_train=50), "pool", 10, (1, 2, 3), repeats=1)
    simulated = cell.run()["simulated"]
    assert simulated["1"] == [3, 5, 7]  # 2h + 1
    assert simulated["8"] == [24, 32, 40]  # (h + 2) M


def curves_of(finals: list[float], title: str = "t") -> Curves:
    runs = {
        h: [{"train": [(value + 1) / 2, value], "test": [(value + 1) / 2, value]}] for h, value in enumerate(finals, 1)
    }
    return Curves(title, "", "epoch", len(finals), False, runs, [1.0])


def test_verdicts_follow_the_losses():
    falling = curves_of([0.5, 0.2, 0.11, 0.1])
    words = [verdict.verdict for verdict in judge([falling])]
    assert words[:4] == ["confirmed"] * 4
    bad = curves_of([0.3, math.inf, 0.9, 0.1])
    words = [verdict.verdict for verdict in judge([bad])]
    assert words[:3] == ["not confirmed"] * 3
    assert "33%" in judge([bad])[0].evidence or "67%" in judge([bad])[0].evidence


def test_measures():
    assert share_of_falling_pairs([3, 2, 1]) == 1
    assert share_of_falling_pairs([1, math.inf, 2]) == pytest.approx(1 / 3)
    assert relative_rate(0.1, 0.01, 1.0) == pytest.approx(0.5)
    assert relative_rate(math.inf, 0.01, 1.0) == -math.inf
    assert [relative(v, [1.0, 2.0, 3.0, math.inf]) for v in (1.0, 2.0, 3.0)] == [0, 0.5, 1]
    assert math.isnan(relative(math.inf, [1.0, 2.0]))
    assert relative(3.0, [2.0]) == pytest.approx(0.5)
    assert grade([True, True], [True, True]) == "confirmed"
    assert grade([True, False], [False, False]) == "confirmed with limits"
    assert grade([False, False], [True, False]) == "not confirmed"
    assert choose_lines(range(1, 16))[:2] == [1, 2]
    assert choose_lines(range(1, 16))[-1] == 15


def test_loco_cuts_a_chain_into_coarse_blocks():
    three, five = selection.list_loco(15)
    assert three.build(15).readouts == (10, 15)
    assert five.build(15).readouts == (6, 9, 12, 15)
    with pytest.raises(ValueError, match="multiple of 15"):
        selection.list_loco(16)


def test_angles_with_a_factor_in_the_model():
    data = TASKS[1].data.load()
    plain = build_chain(ResMLP(4, 5), data.task, readout="pool", seed=0)
    blocks = [Scaled(block, 0.3) if block.residual else block for block in plain.blocks]
    samples = [next(Batches(data.train, batch_size=20, seed=0))]
    readouts = {int(s): readout for s, readout in plain.readouts.items()}
    expected = measure_angles(Chain(blocks, plain.loss, readouts), samples).horizon_cosines()
    small = build_chain(ResMLP(4, 5), data.task, readout="pool", seed=0)
    scale_branches(small, 0.3)
    found = scale_profile(measure_angles(small, samples), small, 0.3).horizon_cosines()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
