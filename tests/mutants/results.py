"""What became of each mutant, as JSON lines that an interrupted run goes on from; and the reasons of survivors."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.mutate import Mutant

KILLED, HUNG, SURVIVED, UNTESTED = "killed", "hung", "survived", "untested"


@dataclass(frozen=True)
class Result:
    """Of one mutant."""

    key: str
    scope: str
    """A digest of the function around it: when that changes, the mutant is run again."""
    outcome: str
    """killed, hung (which is killed, too), survived, or untested: no test runs it"""
    test: str | None
    """The test that saw it."""
    num_tests: int
    """How many tests had the chance."""
    tests: str
    """A digest of those tests' files: when they change, a survivor is run again."""
    seconds: float

    @property
    def is_killed(self) -> bool:
        """Whether the tests have seen it."""
        return self.outcome in (KILLED, HUNG)

    def still_holds(self, scope: str, tests: str) -> bool:
        """Whether it need not be run again."""
        return self.scope == scope and (self.is_killed or self.tests == tests)


class Results:
    """The file; of a mutant that was run several times, the last result counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                result = Result(**json.loads(line))
            except (ValueError, TypeError):
                continue  # cut off by an interruption
            self._known[result.key] = result

    def get(self, mutant: Mutant) -> Result | None:
        """What is known of it."""
        return self._known.get(mutant.key)

    def add(self, result: Result) -> None:
        """Write it down at once."""
        self._known[result.key] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # A line that was cut off must not swallow this one.
            is_whole = file.tell() == 0 or self._path.read_bytes().endswith(b"\n")
            file.write((b"" if is_whole else b"\n") + json.dumps(asdict(result)).encode() + b"\n")


def digest_scope(root: Path, mutant: Mutant) -> str:
    """Of the text of the function around a mutant."""
    lines = (root / mutant.path).read_text().splitlines()
    first, last = mutant.scope
    return _digest(lines[first - 1 : last])


def digest_tests(root: Path, tests: Iterable[str]) -> str:
    """Of these tests and their files."""
    names = sorted(tests)
    files = sorted({name.partition("::")[0] for name in names})
    return _digest([*names, *((root / name).read_text() for name in files if (root / name).is_file())])


def read_reasons(path: Path) -> dict[str, str]:
    """By key: why a survivor may survive, a line `key reason` each."""
    reasons = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key, _, reason = line.strip().partition(" ")
        if len(key) != 12 or not reason.strip():
            raise ValueError(
                f"{path}, line {number}: {line!r} is no reason; write the mutant's key, a space, the reason"
            )
        reasons[key] = reason.strip()
    return reasons


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
