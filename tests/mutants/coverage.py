"""Which tests run which line, and how long each takes: measured once, and again for what has changed."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.client import Client

NO_TESTS = 5
"""pytest's exit code where all tests are deselected."""


@dataclass(frozen=True)
class MeasuredFile:
    """One file of tests as it was measured."""

    digest: str
    sources: Mapping[str, str]
    """The sources that it runs, and the digest of each: when one changes, so do its lines."""
    seconds: Mapping[str, float]
    """Of each test that passes."""
    lines: Mapping[str, Mapping[str, Sequence[int]]]
    """By test and source."""
    failed: Sequence[str] = field(default_factory=tuple)

    def is_current(self, root: Path, path: str) -> bool:
        """Whether it would be measured the same today."""
        files = {path: self.digest, **self.sources}
        return all(digest_of(root / name) == digest for name, digest in files.items())


class Coverage:
    """All measured files, in a file of their own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.files = {name: MeasuredFile(**values) for name, values in content.items()}

    def stale(self, root: Path, paths: Sequence[str]) -> list[str]:
        """The files of tests to be measured; those that are gone are forgotten."""
        self.files = {name: measured for name, measured in self.files.items() if name in paths}
        return [p for p in paths if p not in self.files or not self.files[p].is_current(root, p)]

    def keep(self, path: str, measured: MeasuredFile) -> None:
        """Add one, and write all."""
        self.files[path] = measured
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({name: vars(values) for name, values in self.files.items()}))
        new.replace(self._path)

    @property
    def seconds(self) -> dict[str, float]:
        """Of every test."""
        return {test: seconds for measured in self.files.values() for test, seconds in measured.seconds.items()}

    @property
    def breadth(self) -> dict[str, int]:
        """How many lines every test runs: one that runs few looks closely at them."""
        return {
            test: sum(map(len, by_source.values()))
            for measured in self.files.values()
            for test, by_source in measured.lines.items()
        }

    def tests_of(self, source: str, lines: range) -> list[str]:
        """The tests that run one of these lines."""
        return [
            test
            for measured in self.files.values()
            for test, by_source in measured.lines.items()
            if not set(lines).isdisjoint(by_source.get(source, ()))
        ]


def measure(client: Client, path: str) -> MeasuredFile:
    """Run a file of tests in an overlay without a fault, and see which lines each test runs."""
    with client.overlay.traced() as traced:
        outcome = client.run([path, "-m", "not slow"], {}, goes_on=True)
        found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for record in traced.read_text().splitlines():
            context, _, place = record.partition("\t")
            source, _, line = place.partition("\t")
            found[context][source].add(int(line))
    if outcome.code not in (0, 1, NO_TESTS) and not outcome.events:
        log = (client.overlay.folder / "log").read_text()
        raise RuntimeError(f"{path} cannot be run in {client.overlay.folder}:\n{log[-2000:]}")
    failed = [event[1] for event in outcome.events if event[0] in ("failed", "skipped")]
    failed += [outcome.test] if outcome.kind == "hung" and outcome.test else []
    seconds = {event[1]: event[2] for event in outcome.events if event[0] == "end" and event[1] not in failed}
    shared = {event[1]: event[2] for event in outcome.events if event[0] == "fixtures"}
    lines: dict[str, dict[str, list[int]]] = {}
    for test in seconds:
        joined: dict[str, set[int]] = defaultdict(set)
        for context in (test, *shared.get(test, ())):
            for source, numbers in found[context].items():
                joined[source] |= numbers
        lines[test] = {source: sorted(numbers) for source, numbers in joined.items()}
    sources = sorted({source for by_source in lines.values() for source in by_source})
    skipped = {event[1] for event in outcome.events if event[0] == "skipped"}
    # Of the overlay's files: the project's may have changed since.
    copied = client.overlay.folder
    return MeasuredFile(
        digest_of(copied / path),
        {source: digest_of(copied / source) for source in sources},
        seconds,
        lines,
        [test for test in failed if test not in skipped],
    )


def digest_of(path: Path) -> str:
    """Of a file's content; empty if it is not there."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
