"""Experiments: cells that are run once, kept, and gone on with; pages made of what was kept."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from mpc_dist.study.cell import Result, Store, describe, key_of
from mpc_dist.study.experiment import Experiment, Findings, Table, Verdict, render_page
from mpc_dist.study.runner import run_cells
from tests.conftest import ROOT

QUIET = Console(quiet=True)


@dataclass(frozen=True)
class Square:
    """Squares a number and leaves a trace of having run."""

    number: int
    folder: str
    fails: bool = False

    def run(self) -> Result:
        if self.fails:
            raise ValueError(f"cannot square {self.number}")
        path = Path(self.folder) / f"ran-{self.number}"
        path.write_text(str(int(path.read_text()) + 1) if path.exists() else "1")
        return {"square": self.number**2}


def run_squares(folder: Path, numbers: range, *, failing: int | None = None) -> dict[str, int]:
    cells = {f"square of {n}": Square(n, str(folder), n == failing) for n in numbers}
    records = run_cells(cells, Store(folder / "cells.jsonl"), num_workers=2, title="squares", console=QUIET)
    return {name: record.result["square"] for name, record in records.items()}


def test_a_cell_is_run_once_and_its_result_kept(tmp_path: Path):
    assert run_squares(tmp_path, range(2)) == {"square of 0": 0, "square of 1": 1}
    assert run_squares(tmp_path, range(3)) == {"square of 0": 0, "square of 1": 1, "square of 2": 4}
    assert [(tmp_path / f"ran-{n}").read_text() for n in range(3)] == ["1", "1", "1"]


def test_results_before_a_failing_cell_are_kept_and_gone_on_from(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot square 3"):
        run_squares(tmp_path, range(4), failing=3)
    kept = len((tmp_path / "cells.jsonl").read_text().splitlines())
    assert kept >= 2  # at most one other was under way
    assert run_squares(tmp_path, range(4))["square of 3"] == 9
    assert (tmp_path / "ran-0").read_text() == "1"


@dataclass(frozen=True)
class Meeting:
    """Waits until another cell has begun, too, and says from when to when it ran."""

    number: int
    folder: str

    def run(self) -> Result:
        start = time.monotonic()
        (Path(self.folder) / f"began-{self.number}").touch()
        while len([*Path(self.folder).glob("began-*")]) < 2 and time.monotonic() < start + 60:
            time.sleep(0.01)
        return {"start": start, "end": time.monotonic()}


@dataclass(frozen=True)
class Alone:
    """Says from when to when it ran."""

    number: int
    runs_alone: ClassVar[bool] = True

    def run(self) -> Result:
        start = time.monotonic()
        time.sleep(0.1)
        return {"start": start, "end": time.monotonic()}


def test_a_cell_that_measures_time_runs_alone(tmp_path: Path):
    cells = {"a": Meeting(0, str(tmp_path)), "b": Meeting(1, str(tmp_path)), "timed": Alone(2), "timed too": Alone(3)}
    records = run_cells(cells, Store(tmp_path / "cells.jsonl"), num_workers=2, title="spans", console=QUIET)
    spans = {name: (record.result["start"], record.result["end"]) for name, record in records.items()}
    assert spans["timed"][1] <= spans["timed too"][0]
    assert spans["timed too"][1] <= min(spans["a"][0], spans["b"][0])
    assert spans["a"][0] < spans["b"][1]
    assert spans["b"][0] < spans["a"][1], "the others run side by side"


def test_a_line_that_was_being_written_is_run_again(tmp_path: Path):
    run_squares(tmp_path, range(2))
    path = tmp_path / "cells.jsonl"
    path.write_text(path.read_text()[:-20])
    assert run_squares(tmp_path, range(2)) == {"square of 0": 0, "square of 1": 1}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_another_setting_is_another_cell(tmp_path: Path):
    store = Store(tmp_path / "cells.jsonl")
    store.add("one", Square(1, "a"), {"square": 1}, seconds=0.5)
    assert store.find(Square(1, "a")).seconds == 0.5
    assert store.find(Square(1, "b")) is None
    assert describe(Square(1, "a")) == {"kind": "Square", "number": 1, "folder": "a", "fails": False}


def test_a_field_that_is_added_with_a_default_leaves_results_valid():
    @dataclass(frozen=True)
    class Square:
        number: int
        folder: str
        fails: bool = False
        rounds: int = 1

    assert key_of(Square(1, "a")) == key_of(globals()["Square"](1, "a"))
    assert key_of(Square(1, "a", rounds=2)) != key_of(Square(1, "a"))


def test_what_an_earlier_design_asked_for_is_dropped_on_request(tmp_path: Path):
    store = Store(tmp_path / "cells.jsonl")
    for n in range(3):
        store.add(str(n), Square(n, ""), {"square": n}, seconds=0)
    store.keep_only({"two": Square(2, ""), "none": Square(7, "")})
    again = Store(tmp_path / "cells.jsonl")
    assert [again.find(Square(n, "")) is not None for n in range(3)] == [False, False, True]


def test_a_store_that_holds_something_else_is_refused_by_its_line(tmp_path: Path):
    (tmp_path / "cells.jsonl").write_text('{"no": "record"}\n')
    with pytest.raises(ValueError, match=r"cells\.jsonl, line 1"):
        Store(tmp_path / "cells.jsonl")


def test_a_page_is_made_of_the_records_alone(tmp_path: Path):
    store = Store(tmp_path / "cells.jsonl")
    store.add("one", Square(1, ""), {"square": 1}, seconds=36)
    record = store.find(Square(1, ""))
    findings = Findings(
        "It squares.",
        tables=(Table("Squares", ("n", "|n|"), (("1", "1"),)),),
        verdicts=(Verdict("1 squared is 1", "confirmed", f"{record.result['square']}"),),
    )
    experiment = Experiment("squares", "Squares of numbers", lambda _: {}, lambda _: findings)
    text = render_page(experiment, findings, {"one": record}, quick=True)
    assert "`mpc-dist reproduce squares --quick`: 1 runs, 0.01 processor hours" in text
    assert "| 1 squared is 1 | **confirmed** | 1 |" in text
    assert "| n | \\|n\\| |" in text


def list_workers(folder: Path) -> list[str]:
    """Processes that were started from this folder's script, a moment later."""
    deadline = time.monotonic() + 20
    while True:
        environments = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environments.append((process / "environ").read_bytes())
        found = [text.decode(errors="replace") for text in environments if f"MARK={folder}".encode() in text]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_experiment_goes_on_and_gives_the_same(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.study.test_runner import run_squares\n"
        "if __name__ == '__main__': run_squares(Path(sys.argv[1]), range(40))\n"
    )
    (tmp_path / "go.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "go.py"), str(tmp_path)], env=environment, start_new_session=True
    )
    try:
        path, deadline = tmp_path / "cells.jsonl", time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.read_text().count("\n") >= 3):
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(timeout=30)
    assert path.read_text().count("\n") >= 3
    assert not list_workers(tmp_path), "nobody goes on working for a dead experiment"
    assert run_squares(tmp_path, range(40)) == {f"square of {n}": n**2 for n in range(40)}
