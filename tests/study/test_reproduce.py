"""The command that runs experiments and writes their pages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mpc_dist.cli import main
from mpc_dist.commands import reproduce
from mpc_dist.study.cell import Cell
from mpc_dist.study.experiment import Experiment, Findings, Picture, Records, Verdict
from tests.study.test_runner import Square


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Experiment:
    def build_cells(quick: bool) -> Mapping[str, Cell]:
        return {f"square of {n}": Square(n, str(tmp_path)) for n in range(1 if quick else 2)}

    def conclude(records: Records) -> Findings:
        total = sum(record.result["square"] for record in records.values())
        verdicts = (
            Verdict("squares sum up", "confirmed", f"{total}"),
            Verdict("squares are even", "not confirmed", "1 is not"),
        )
        return Findings("They do.", pictures=(Picture("sum", Figure(), "A figure."),), verdicts=verdicts)

    experiment = Experiment("squares", "Squares", build_cells, conclude)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"squares": experiment})
    monkeypatch.chdir(tmp_path)
    return experiment


def test_an_experiment_runs_and_writes_page_figure_and_index(squares: Experiment, tmp_path: Path):
    assert main(["reproduce", "squares", "--quick"]) == 0
    folder = tmp_path / "runs" / "reproduce-quick"
    assert {path.name for path in (folder / "squares").iterdir()} == {"README.md", "cells.jsonl", "sum.png"}
    index = (folder / "README.md").read_text()
    assert index.index("squares are even") < index.index("squares sum up"), "surprises come first"


def test_a_page_beside_its_folder_stands_alone_without_an_index(
    squares: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"squares": replace(squares, page_beside=True)})
    assert main(["reproduce", "squares", "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"squares", "squares.md"}


def test_pages_can_be_written_again_without_running(squares: Experiment, tmp_path: Path):
    out = tmp_path / "out"
    assert main(["reproduce", "all", "--out", str(out)]) == 0
    page = out / "squares" / "README.md"
    first = page.read_text()
    page.unlink()
    assert main(["reproduce", "squares", "--out", str(out), "--page-only"]) == 0
    assert page.read_text() == first
    assert (tmp_path / "ran-1").read_text() == "1"


def test_no_page_is_written_of_half_an_experiment(squares: Experiment, tmp_path: Path):
    assert main(["reproduce", "squares", "--out", str(tmp_path / "out"), "--page-only"]) == 0
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_said_before_any_work(
    squares: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    needy = Experiment("needy", "Needs data", squares.build_cells, squares.conclude, needs=("data/none",))
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {"needy": needy})
    assert main(["reproduce", "needy"]) == 2
    assert "needy needs data/none" in capsys.readouterr().err
    assert main(["reproduce", "all"]) == 0
    assert "needy: left out, it needs data/none" in capsys.readouterr().out
    assert main(["reproduce", "neady"]) == 2
    assert "needy" in capsys.readouterr().err
    assert main(["reproduce", "needy", "--jobs", "0"]) == 2
    assert not (tmp_path / "runs").exists()
