"""Mutation testing finds what tests do not see, and only that."""

import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.mutants import hunt
from tests.mutants.__main__ import main
from tests.mutants.choose import choose_mutants, share_out
from tests.mutants.mutate import Mutant, find_mutants
from tests.mutants.page import make_page
from tests.mutants.results import KILLED, SURVIVED, Result, Results, read_reasons

SOURCE = '''"""Numbers 1 and 2 in a docstring."""

LIMIT = 4


class Mean:
    """A mean, of at least 1."""

    size: int = 3

    def of(self, values: "list[int]", *, strictly: bool = True) -> float:
        """Divide by 1 or more."""
        assert len(values) > 0
        if len(values) > 4 or not strictly:
            raise ValueError(f"at most {4 + 0}, got " + str(len(values) - 0))
        print("done", 1 + 1)
        self.last = sum(values) / len(values)
        return round(self.last, ndigits=3)

    def __repr__(self) -> str:
        return "mean" + str(1 + 1)
'''


def changed_lines(source: str) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in find_mutants("mean.py", source)}


def test_faults_are_planted_in_what_is_computed_and_in_nothing_else():
    found = find_mutants("mean.py", SOURCE)
    assert {mutant.function for mutant in found} == {"Mean.of"}
    assert {(mutant.kind, mutant.after) for mutant in found} == {
        ("switch", 'def of(self, values: "list[int]", *, strictly: bool = False) -> float:'),
        ("and / or", "if (len(values) > 4 and (not strictly)):"),
        ("condition negated", "if (not (len(values) > 4 or not strictly)):"),
        ("comparison", "if len(values) >= 4 or not strictly:"),
        ("off by one", "if len(values) > 5 or not strictly:"),
        ("sign dropped", "if len(values) > 4 or (strictly):"),
        ("error not raised", "pass"),
        ("assignment dropped", "pass"),
        ("arithmetic", "self.last = (sum(values) * len(values))"),
        ("division dropped", "self.last = (sum(values))"),
        ("nothing returned", "return None"),
        ("argument dropped", "return round(self.last)"),
        ("off by one", "return round(self.last, ndigits=4)"),
    }


def test_every_mutant_differs_and_compiles():
    found = find_mutants("mean.py", SOURCE)
    texts = [mutant.apply(SOURCE) for mutant in found]
    assert len({ast.dump(ast.parse(text)) for text in texts} - {ast.dump(ast.parse(SOURCE))}) == len(found)
    assert len({mutant.key for mutant in found}) == len(found)


def test_a_mutant_keeps_its_name_when_lines_move():
    moved = SOURCE.replace("LIMIT = 4\n", "LIMIT = 4\nOTHER = 'é'\n\n")
    assert [mutant.key for mutant in find_mutants("mean.py", SOURCE)] == [
        mutant.key for mutant in find_mutants("mean.py", moved)
    ]


def test_arguments_and_returned_truth():
    source = "def f(a, b) -> bool:\n    g(a, b, c=1)\n    return min(a, b) < -2\n"
    assert changed_lines(source) == {
        ("g(a, b, c=1)", "pass"),
        ("g(a, b, c=1)", "g(b, a, c=1)"),
        ("g(a, b, c=1)", "g(a, b)"),
        ("g(a, b, c=1)", "g(a, b, c=2)"),
        ("return min(a, b) < -2", "return not (min(a, b) < -2)"),
        ("return min(a, b) < -2", "return min(a, b) <= -2"),
        ("return min(a, b) < -2", "return max(a, b) < -2"),
        ("return min(a, b) < -2", "return min(a, b) < (2)"),
    }


def test_mutants_are_shared_out_by_size():
    assert share_out(10, {"a": 75, "b": 25, "c": 0}) == {"a": 8, "b": 2, "c": 0}
    assert share_out(10, {"a": 2, "b": 1}) == {"a": 2, "b": 1}
    assert share_out(3, {}) == {}


def test_a_draw_depends_on_its_seed_and_on_nothing_else(tmp_path: Path):
    (tmp_path / "a.py").write_text(SOURCE)
    first, again, other = (choose_mutants(tmp_path, ["a.py"], number=5, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len(set(first) | set(other)) > len(first) == 5


CALC = """def share(total: float, count: int) -> float:
    return total / count


def wait(is_done: bool) -> None:
    while not is_done:
        pass


def weak(number: int) -> int:
    return number + 7


def in_a_rank(number: int) -> int:
    return number * 3


def in_a_process(number: int) -> int:
    return number - 4


def forgotten(number: int) -> int:
    return number + 1
"""
CHECKS = """import multiprocessing
import subprocess
import sys

import pytest

from pkg import calc


@pytest.fixture(scope="module")
def shared():
    return calc.share(6, 3)


def test_before(shared):
    pass


def test_share(shared):
    assert shared == 2


def test_wait():
    calc.wait(True)


def test_weak():
    assert calc.weak(1) > 0


def test_rank():
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(calc.in_a_rank, (2,)) == 6


def test_process():
    subprocess.run([sys.executable, "-c", "from pkg.calc import in_a_process; assert in_a_process(9) == 5"], check=True)
"""


def build_project(root: Path) -> None:
    for folder in ("pkg", "checks"):
        (root / folder).mkdir()
        (root / folder / "__init__.py").write_text("")
    (root / "pkg" / "calc.py").write_text(CALC)
    (root / "checks" / "test_calc.py").write_text(CHECKS)


def run_project(root: Path) -> int:
    options = "--sources pkg/calc.py --tests checks --preload --page page.md --reasons reasons.txt"
    return main(options.split(), root)


def outcomes(root: Path) -> dict[str, str]:
    """By the mutated line."""
    results = Results(root / "build/mutants/results.jsonl")
    found = {}
    for mutant in find_mutants("pkg/calc.py", (root / "pkg" / "calc.py").read_text()):
        result = results.get(mutant)
        assert result is not None
        found[f"{mutant.function}: {mutant.after}"] = result.outcome
    return found


@pytest.mark.slow
def test_a_small_project_from_the_first_run_to_the_last_survivor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hunt, "LIMIT_EXTRA", 3.0)
    build_project(tmp_path)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    assert run_project(tmp_path) == 1
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before
    assert (tmp_path / "pkg" / "calc.py").read_text() == CALC

    found = outcomes(tmp_path)
    assert found["share: return (total * count)"] == "killed"
    assert found["share: return (total)"] == "killed"
    assert found["wait: while (is_done):"] == "hung"
    assert found["in_a_rank: return (number / 3)"] == "killed"
    assert found["in_a_process: return (number + 4)"] == "killed"
    survivors = {after: outcome for after, outcome in found.items() if outcome in ("survived", "untested")}
    assert survivors == {
        "weak: return number + 8": "survived",
        "forgotten: return (number - 1)": "untested",
        "forgotten: return number + 2": "untested",
        "forgotten: return None": "untested",
    }
    page = (tmp_path / "page.md").read_text()
    assert "return number + 8" in page
    assert f"{len(found)} mutants, {len(found) - 4} killed" in page

    # Again: nothing is run, not even after a line that was cut off.
    results = tmp_path / "build/mutants/results.jsonl"
    with results.open("a") as file:
        file.write('{"key": "cut o')
    lines = results.read_bytes()
    assert run_project(tmp_path) == 1
    assert results.read_bytes() == lines

    # A better test, and a reason for what is left: only the survivors that it concerns are run.
    checks = tmp_path / "checks" / "test_calc.py"
    checks.write_text(CHECKS.replace("calc.weak(1) > 0", "calc.weak(1) == 8"))
    left = [mutant for mutant in find_mutants("pkg/calc.py", CALC) if mutant.function == "forgotten"]
    (tmp_path / "reasons.txt").write_text("# why\n" + "".join(f"{mutant.key} nobody calls it\n" for mutant in left))
    assert run_project(tmp_path) == 0
    assert outcomes(tmp_path)["weak: return number + 8"] == "killed"
    assert results.read_bytes().startswith(lines)
    assert len(results.read_bytes().splitlines()) == len(lines.splitlines()) + 1
    assert (tmp_path / "page.md").read_text().count("**Reason:** nobody calls it") == 3


DEPENDENT = """import time

import pytest

from pkg import calc

STATE = {"is_clean": True}


@pytest.fixture(scope="module")
def slow_to_make():
    time.sleep(4)


def test_slow_first(slow_to_make):
    calc.weak(1)


def test_quick_later(slow_to_make):
    calc.weak(1)


def test_wants_a_clean_state():
    time.sleep(0.1)
    calc.weak(1)
    assert STATE["is_clean"]


def test_leaves_its_mark():
    calc.weak(1)
    STATE["is_clean"] = False
"""
"""All pass in this order; the quickest first, one fails and another takes longer than by itself."""


@pytest.mark.slow
def test_a_test_that_fails_for_its_place_alone_kills_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hunt, "LIMIT_EXTRA", 2.0)
    monkeypatch.setattr(hunt, "LIMIT_FACTOR", 1.5)
    build_project(tmp_path)
    (tmp_path / "pkg" / "calc.py").write_text("def weak(number: int) -> int:\n    return number + 7\n")
    (tmp_path / "checks" / "test_calc.py").write_text(DEPENDENT)
    assert run_project(tmp_path) == 1
    assert set(outcomes(tmp_path).values()) == {"survived"}


def test_a_killed_run_leaves_no_process_and_the_next_removes_its_files(tmp_path: Path):
    build_project(tmp_path)
    (tmp_path / "checks" / "test_calc.py").write_text("import time\n\n\ndef test_long():\n    time.sleep(600)\n")
    code = "from pathlib import Path; from tests.mutants.test_mutants import run_project; run_project(Path.cwd())"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    whole = psutil.Process(run.pid)

    def wait_for(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    wait_for(lambda: any(path.stat().st_size for path in temporary.glob("*/log")) or len(whole.children(True)) >= 3)
    started = whole.children(recursive=True)
    run.kill()
    run.wait()
    wait_for(lambda: not any(process.is_running() and process.status() != "zombie" for process in started))
    assert list(temporary.iterdir())
    hunt.remove_orphans(temporary)
    assert not list(temporary.iterdir())


def test_a_reason_without_words_is_refused(tmp_path: Path):
    (tmp_path / "reasons.txt").write_text("0123456789ab\n")
    with pytest.raises(ValueError, match=r"line 1: '0123456789ab' is no reason; write the mutant's key"):
        read_reasons(tmp_path / "reasons.txt")


def test_a_change_of_the_function_or_of_the_tests_of_a_survivor_asks_for_another_run():
    killed = Result("k", "scope", KILLED, "a test", 3, "tests", 1.0)
    survived = Result("k", "scope", SURVIVED, None, 3, "tests", 1.0)
    for result in (killed, survived):
        assert result.still_holds("scope", "tests")
        assert not result.still_holds("other", "tests")
    assert killed.still_holds("scope", "other tests")
    assert not survived.still_holds("scope", "other tests")


def test_the_page_of_nothing_says_so():
    page = make_page([], {}, number=3, seed=0)
    assert "0 mutants, 0 killed" in page
    assert "Not finished: 0 of 3 have been run" in page
    assert "Not finished" not in make_page([], {}, number=0, seed=0)


def test_a_mutant_is_shown_on_one_line():
    (mutant,) = (
        m for m in find_mutants("a.py", "def f():\n    return [\n        g,\n    ]\n") if m.kind == "nothing returned"
    )
    assert isinstance(mutant, Mutant)
    assert (mutant.before, mutant.after, mutant.statement) == ("return [ g, ]", "return None", (2, 4))
