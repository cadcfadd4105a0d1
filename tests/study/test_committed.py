"""The committed results: every page is made of the runs that are committed beside it, and those are complete."""

import pytest

from mpc_dist.commands.reproduce import EXPERIMENTS
from mpc_dist.study.cell import Store
from mpc_dist.study.experiment import Experiment, Findings, Records, page_path, render_page
from mpc_dist.study.runner import collect
from tests.conftest import ROOT

RESULTS = {name: ROOT / "docs" / ("" if one.page_beside else "paper") / name for name, one in EXPERIMENTS.items()}


def read(name: str) -> tuple[Experiment, Records, Findings]:
    experiment = EXPERIMENTS[name]
    cells = experiment.build_cells(False)
    records = collect(cells, Store(RESULTS[name] / "cells.jsonl"))
    assert set(records) == set(cells), "some runs of the full variant are missing: go on with --out docs/paper"
    return experiment, records, experiment.conclude(records)


@pytest.mark.parametrize("name", RESULTS)
def test_a_committed_page_is_made_of_its_committed_runs(name: str):
    experiment, records, findings = read(name)
    assert page_path(experiment, RESULTS[name]).read_text() == render_page(experiment, findings, records, quick=False)
    for picture in findings.pictures:
        assert (RESULTS[name] / f"{picture.name}.png").stat().st_size > 5_000
