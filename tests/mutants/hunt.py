"""Runs every mutant against the tests that run its line, the quickest first, until one sees it."""

import os
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
BUDGET = 90.0
"""Seconds of tests that a mutant must survive; slower ones are left out."""
LIMIT_FACTOR, LIMIT_EXTRA = 6.0, 15.0
"""A test hangs after so many times its seconds, and so many more: others may use the machine."""
MOST_FAVOURITES = 4
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

        def one(client: Client, mutant: Mutant) -> None:
            tests = self.tests_for(mutant)
            began = time.monotonic()
            outcome, test = self._try(client, mutant, tests, seconds) if tests else (UNTESTED, None)
            result = Result(
                mutant.key,
                digest_scope(self._root, mutant),
                outcome,
                test,
                len(tests),
                digest_tests(self._root, tests),
                round(time.monotonic() - began, 2),
            )
            with self._lock:
                if test is not None:
                    self._kills[mutant.path][test] += 1
                self._results.add(result)
                done(mutant, result)

        self._spread(mutants, one)

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
        text = mutant.apply((client.overlay.folder / mutant.path).read_text())
        limits = {test: LIMIT_EXTRA + LIMIT_FACTOR * seconds[test] for test in tests}
        with client.overlay.planted(mutant.path, text):
            for group in self._groups(mutant, tests, seconds):
                outcome = client.run(group, limits)
                if outcome.kind != "passed":
                    return (HUNG if outcome.kind == "hung" else KILLED), outcome.test or group[0]
        return SURVIVED, None

    def _groups(self, mutant: Mutant, tests: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
        """First those that saw most faults of this file, then by speed."""
        favourites = [test for test, _ in self._kills[mutant.path].most_common() if test in tests][:MOST_FAVOURITES]
        least = 0.0
        for most in PHASES:
            group = [test for test in tests if least <= seconds[test] < most]
            first = [test for test in favourites if test in group]
            if group:
                yield [*first, *(test for test in group if test not in first)]
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
