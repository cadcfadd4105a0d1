"""Runs every mutant against the tests that run its line, the quickest first, until one sees it.

Tests run here in another order than usual, beside other work: one may fail for that alone. So the test that saw a fault
is run again by itself, with the fault, where it must fail, and without it, where it must pass.
"""

import os
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import psutil

from tests.mutants.client import Client
from tests.mutants.coverage import Coverage, measure
from tests.mutants.mutate import Mutant
from tests.mutants.results import HUNG, KILLED, SURVIVED, UNTESTED, Result, Results, digest_scope, digest_tests

PHASES = (0.5, 4.0, float("inf"))
"""Tests are run in groups that end at these seconds per test: a start takes about a second, an early end saves more."""
BUDGET = 45.0
"""Seconds of tests that a mutant must survive; slower ones are left out."""
LIMIT_FACTOR, LIMIT_EXTRA = 6.0, 15.0
"""A test hangs after so many times its seconds, and so many more: others may use the machine."""
MOST_FAVOURITES, MOST_NARROW = 4, 12
PREFIX = "mutants-"

Item = TypeVar("Item")


class Hunt:
    """Overlays side by side, and what is found in them."""

    def __init__(
        self,
        root: Path,
        coverage: Coverage,
        results: Results,
        sources: Sequence[str],
        *,
        preload: Sequence[str],
        workers: int,
    ) -> None:
        self._root = root
        self._coverage = coverage
        self._results = results
        self._sources = sources
        self._preload = preload
        self._workers = workers
        self._lock = threading.Lock()
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)
        self._breadth: dict[str, int] = {}
        self.doubtful: Counter[str] = Counter()
        """Tests that failed beside others but not again alone, or without the fault as well; how often."""

    def measure(self, paths: Sequence[str], done: Callable[[str], None]) -> None:
        """See which lines these files of tests run, and how long each test takes."""

        def one(client: Client, path: str) -> None:
            measured = measure(client, path)
            with self._lock:
                self._coverage.keep(path, measured)
                done(path)

        self._spread(paths, one)

    def run(self, mutants: Sequence[Mutant], done: Callable[[Mutant, Result], None]) -> None:
        """Run these mutants."""
        seconds = self._coverage.seconds
        self._breadth = self._coverage.breadth

        def one(client: Client, mutant: Mutant) -> None:
            tests = self.tests_for(mutant)
            began = time.monotonic()
            outcome, test = self._try(client, mutant, tests, seconds) if tests else (UNTESTED, None)
            # Of what was run: the project's files may have changed since.
            copied = client.overlay.folder
            result = Result(
                mutant.key,
                digest_scope(copied, mutant),
                outcome,
                test,
                len(tests),
                digest_tests(copied, tests),
                round(time.monotonic() - began, 2),
            )
            with self._lock:
                if test is not None:
                    self._kills[mutant.path][test] += 1
                self._results.add(result)
                done(mutant, result)

        # By name, which is by chance: a run that is interrupted has seen a bit of everything.
        self._spread(sorted(mutants, key=lambda mutant: mutant.key), one)

    def unfinished(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Those without a result that still holds."""
        return [mutant for mutant in mutants if not self._is_known(mutant)]

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement, or else its function, the quickest first, within the budget."""
        seconds = self._coverage.seconds
        first, last = mutant.statement
        tests = self._coverage.tests_of(mutant.path, range(first, last + 1))
        if not tests:
            tests = self._coverage.tests_of(mutant.path, range(mutant.scope[0] + 1, mutant.scope[1] + 1))
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda test: (seconds[test], test)):
            total += seconds[test]
            if chosen and total > BUDGET:
                break
            chosen.append(test)
        return chosen

    def _is_known(self, mutant: Mutant) -> bool:
        known = self._results.get(mutant)
        if known is None:
            return False
        tests = self.tests_for(mutant)
        return known.still_holds(digest_scope(self._root, mutant), digest_tests(self._root, tests))

    def _try(
        self, client: Client, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float]
    ) -> tuple[str, str | None]:
        """What became of it, and who saw it; who only seems to have seen it is passed over."""
        text = mutant.apply((client.overlay.folder / mutant.path).read_text())
        limits = self._limits(tests, seconds)
        left = list(tests)
        while left:
            with client.overlay.planted(mutant.path, text):
                suspicion, passed = self._suspect(client, self._groups(mutant, left, seconds), limits)
                if suspicion is None:
                    return SURVIVED, None
                kind, test = suspicion
                fails_again = client.run([test], limits).kind != "passed"
            if fails_again and client.run([test], limits).kind == "passed":
                return (HUNG if kind == "hung" else KILLED), test
            with self._lock:
                self.doubtful[test] += 1
            left = [other for other in left if other not in passed and other != test]
        return SURVIVED, None

    def _suspect(
        self, client: Client, groups: Iterator[list[str]], limits: Mapping[str, float]
    ) -> tuple[tuple[str, str] | None, set[str]]:
        """How the first run ended that did not pass, and at which test; and the tests that passed before."""
        passed: set[str] = set()
        for group in groups:
            outcome = client.run(group, limits)
            if outcome.kind != "passed":
                # A file that cannot be imported is no test: any of its tests will show it.
                of_file = [test for test in group if test.partition("::")[0] == outcome.test]
                test = outcome.test if outcome.test in group else [*of_file, group[0]][0]
                passed |= {event[1] for event in outcome.events if event[0] == "end"} - {test}
                return (outcome.kind, test), passed
            passed |= set(group)
        return None, passed

    def _limits(self, tests: Sequence[str], seconds: dict[str, float]) -> dict[str, float]:
        """Seconds after which each test hangs; what its file makes once may fall to any of its tests."""
        longest: dict[str, float] = defaultdict(float)
        for test, taken in seconds.items():
            file = test.partition("::")[0]
            longest[file] = max(longest[file], taken)
        return {t: LIMIT_EXTRA + LIMIT_FACTOR * (seconds[t] + longest[t.partition("::")[0]]) for t in tests}

    def _groups(self, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
        """First a few that saw most faults of this file and those that run least beside it, then by speed."""
        quick = [test for test in tests if seconds[test] < PHASES[1]]
        favourites = [test for test, _ in self._kills[mutant.path].most_common() if test in quick][:MOST_FAVOURITES]
        narrow = sorted(quick, key=lambda test: (self._breadth[test], seconds[test]))[:MOST_NARROW]
        first = list(dict.fromkeys([*favourites, *narrow]))
        if first:
            yield first
        rest = [test for test in tests if test not in set(first)]
        least = 0.0
        for most in PHASES:
            group = [test for test in rest if least <= seconds[test] < most]
            if group:
                yield group
            least = most

    def _spread(self, items: Sequence[Item], work: Callable[[Client, Item], None]) -> None:
        """Do the work on every item, so many at a time, each in an overlay of its own."""
        if not items:
            return
        with self._clients(min(self._workers, len(items))) as free, ThreadPoolExecutor(self._workers) as pool:

            def one(item: Item) -> None:
                client = free.get()
                try:
                    work(client, item)
                finally:
                    free.put(client)

            futures = [pool.submit(one, item) for item in items]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    @contextmanager
    def _clients(self, number: int) -> Iterator["SimpleQueue[Client]"]:
        free: SimpleQueue[Client] = SimpleQueue()
        remove_orphans(Path(tempfile.gettempdir()))
        prefix = f"{PREFIX}{os.getpid()}-"
        with ExitStack() as stack:
            for _ in range(number):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
                free.put(stack.enter_context(Client(self._root, Path(folder), self._sources, self._preload)))
            yield free


def remove_orphans(temporary: Path) -> None:
    """Remove the overlays of runs that were killed."""
    for folder in temporary.glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
