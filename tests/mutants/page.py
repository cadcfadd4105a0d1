"""The page of a run: totals by package, and every survivor with its line and, if there is one, its reason."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from textwrap import shorten

from tests.mutants.mutate import Mutant
from tests.mutants.results import HUNG, UNTESTED, Result

_WIDTH = 160


def make_page(found: Sequence[tuple[Mutant, Result]], reasons: Mapping[str, str], *, number: int, seed: int) -> str:
    """The page in Markdown."""
    killed = sum(result.is_killed for _, result in found)
    survivors = [(mutant, result) for mutant, result in found if not result.is_killed]
    lines = [
        "# Mutants",
        "",
        "Small faults planted one at a time, each run against the tests that run its line; made by "
        f"`make mutants NUM={number} SEED={seed}`. [tests/mutants](../tests/mutants/mutate.py) says what is planted.",
        "",
        f"{len(found)} mutants, {killed} killed ({_percent(killed, len(found))}); of the {len(survivors)} survivors "
        f"{sum(mutant.key in reasons for mutant, _ in survivors)} have a reason.",
        *([] if len(found) == number else ["", f"**Not finished: {len(found)} of {number} have been run.**"]),
        "",
        "| package | mutants | killed | of these hung | survived | of these no test runs |",
        "|---|---|---|---|---|---|",
        *(_row(name, [result for mutant, result in found if package_of(mutant) == name]) for name in _packages(found)),
        "",
    ]
    if survivors:
        lines += ["## Survivors", ""]
    for mutant, result in survivors:
        reason = reasons.get(mutant.key)
        tests = "no test runs it" if result.outcome == UNTESTED else f"{result.num_tests} tests"
        lines += [
            f"- `{mutant.key}` {mutant.path}, line {mutant.line}, `{mutant.function}`: {mutant.kind} ({tests}).",
            *([f"  **Reason:** {reason}"] if reason else ["  **No reason yet.**"]),
            "",
            "  ```diff",
            f"  - {shorten(mutant.before, _WIDTH)}",
            f"  + {shorten(mutant.after, _WIDTH)}",
            "  ```",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def package_of(mutant: Mutant) -> str:
    """The folder below the package, or the module."""
    return "/".join(PurePath(mutant.path).parts[1:2]) or mutant.path


def _packages(found: Sequence[tuple[Mutant, Result]]) -> list[str]:
    return list(dict.fromkeys(package_of(mutant) for mutant, _ in found))


def _row(name: str, results: Sequence[Result]) -> str:
    killed = sum(result.is_killed for result in results)
    hung = sum(result.outcome == HUNG for result in results)
    untested = sum(result.outcome == UNTESTED for result in results)
    share = _percent(killed, len(results))
    return f"| {name} | {len(results)} | {killed} ({share}) | {hung} | {len(results) - killed} | {untested} |"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"
