"""Plant faults, run the tests that should see them, and write the page: `make mutants NUM=300 SEED=0`.

A run that is interrupted goes on where it was; what was seen is not run again until the function around it changes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests.mutants.choose import SOURCES, choose_mutants, list_sources
from tests.mutants.coverage import Coverage
from tests.mutants.hunt import Hunt
from tests.mutants.mutate import Mutant
from tests.mutants.page import make_page
from tests.mutants.results import Result, Results, read_reasons

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    *("tests/schedule", "tests/runtime", "tests/training", "tests/planner", "tests/profile", "tests/models"),
    *("tests/test_windows.py", "tests/test_gradient.py", "tests/test_readout.py", "tests/reliability"),
)
"""Where tests of what is mutated are; reports, studies and examples look at it from further away."""

PRELOADED = (
    *(
        "torch",
        "torch.distributed",
        "torch.func",
        "numpy",
        "pytest",
        "hypothesis",
        "rich.progress",
        "rich.table",
        "yaml",
    ),
    *("jsonargparse", "safetensors.torch", "matplotlib.figure", "jinja2", "transformers", "peft", "sklearn.datasets"),
)
"""What is slow to import, and does not import what is mutated."""


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run, and return 1 if a survivor has no reason."""
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--number", type=int, default=300, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument("--workers", type=int, default=2, help="how many are run at a time")
    parser.add_argument("--sources", nargs="+", default=SOURCES, help="files and folders to mutate")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests")
    parser.add_argument("--keep", default="build/mutants", help="the folder from which a run goes on")
    parser.add_argument("--page", default="docs/mutants.md", help="the page to write")
    parser.add_argument("--reasons", default="tests/mutants/reasons.txt", help="why survivors may survive")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules that are imported once")
    given = parser.parse_args(argv)

    sources = list_sources(root, given.sources)
    mutants = choose_mutants(root, sources, number=given.number, seed=given.seed)
    coverage = Coverage(root / given.keep / "lines.json")
    results = Results(root / given.keep / "results.jsonl")
    hunt = Hunt(root, coverage, results, sources, preload=given.preload, workers=given.workers)

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        stale = coverage.stale(root, find_tests(root, given.tests))
        bar = progress.add_task("tests measured", total=len(stale))
        hunt.measure(stale, lambda path: progress.update(bar, advance=1))
        for path, measured in coverage.files.items():
            for test in measured.failed:
                console.print(
                    f"fails without any fault, and is left out: {test} (of {path})", markup=False, soft_wrap=True
                )
        left = hunt.unfinished(mutants)
        bar = progress.add_task("mutants", total=len(mutants), completed=len(mutants) - len(left))

        def show(mutant: Mutant, result: Result) -> None:
            progress.update(bar, advance=1)
            if not result.is_killed:
                console.print(
                    f"{result.outcome}: {mutant.path}:{mutant.line} {mutant.after}", markup=False, soft_wrap=True
                )

        hunt.run(left, show)

    for test, times in hunt.doubtful.most_common():
        console.print(f"failed {times} times, but not because of the fault: {test}", markup=False, soft_wrap=True)
    found = [(mutant, result) for mutant in mutants if (result := results.get(mutant)) is not None]
    reasons = read_reasons(root / given.reasons)
    page = root / given.page
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(make_page(found, reasons, number=len(mutants), seed=given.seed))
    killed = sum(result.is_killed for _, result in found)
    open_ones = [mutant for mutant, result in found if not result.is_killed and mutant.key not in reasons]
    console.print(f"{killed} of {len(found)} mutants killed; {len(open_ones)} survivors without a reason: {given.page}")
    return 1 if open_ones else 0


def find_tests(root: Path, names: Sequence[str]) -> list[str]:
    """The files of tests in these files and folders."""
    found = []
    for name in names:
        path = root / name
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(root)) for file in files]
    return found


if __name__ == "__main__":
    sys.exit(main())
