"""A process that has imported what is slow to import, but nothing of the project, and forks itself for every run.

It reads jobs from its input and answers on its output, a line of JSON each; it ends, with all that it started, when its
input ends or its parent does. It is started in an overlay: `python -m tests.mutants.server MODULE ...`.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO

import psutil

COLLECTING = 120.0
"""Most seconds until the first test starts, and from the last one to the end."""
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


class Reporter:
    """A pytest plugin that tells the server what happens, and the tracer what runs."""

    def __init__(self, out: BinaryIO, folder: Path) -> None:
        from tests.mutants.tracer import CONTEXT, start

        self._out = out
        self._context_path = folder / CONTEXT
        self._tracer = start(folder)
        self._began = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.perf_counter()
        self._enter(nodeid)
        self._tell("start", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)
        if report.skipped:
            self._tell("skipped", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("end", nodeid, time.perf_counter() - self._began)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def pytest_runtest_setup(self, item: Any) -> None:
        if self._tracer is not None:
            self._tell("fixtures", item.nodeid, [_shared_context(found[-1]) for found in _shared_fixtures(item)])

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        """What is made once for several tests is run by each of them."""
        if fixturedef.scope != "function":
            self._enter(_shared_context(fixturedef))

    def pytest_runtest_call(self, item: Any) -> None:
        self._enter(item.nodeid)

    def _enter(self, context: str) -> None:
        if self._tracer is not None:
            self._context_path.write_text(context)
            self._tracer.enter(context)

    def _tell(self, *values: object) -> None:
        self._out.write(json.dumps(values).encode() + b"\n")
        self._out.flush()


def _shared_fixtures(item: Any) -> list[Any]:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return [found for found in definitions if found and found[-1].scope != "function"]


def _shared_context(definition: Any) -> str:
    return f"fixture {definition.baseid}::{definition.argname}"


class Run:
    """One run of tests in a fork, followed to its end or to its time limit."""

    def __init__(self, tests: list[str], limits: Mapping[str, float], *, goes_on: bool) -> None:
        self._limits = limits
        self._running: str | None = None
        self._events: list[Any] = []
        self._failed: str | None = None
        read, write = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(read)
            _run_tests(tests, write, goes_on=goes_on)
        os.close(write)
        self._file = read

    def follow(self) -> dict[str, Any]:
        """What became of it: passed, failed or hung, at which test, and all events."""
        pending, deadline, outcome = b"", time.monotonic() + COLLECTING, "ended"
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                outcome = "hung"
                break
            if not select.select([self._file], [], [], min(left, 1.0))[0]:
                continue
            chunk = os.read(self._file, 1 << 16)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self._events.append(event)
                if event[0] == "start":
                    self._running = event[1]
                    deadline = time.monotonic() + self._limits.get(event[1], COLLECTING)
                elif event[0] == "end":
                    deadline = time.monotonic() + COLLECTING
                elif event[0] == "failed" and self._failed is None:
                    self._failed = event[1]
        os.close(self._file)
        code = self._end()
        if outcome == "ended":
            outcome = "passed" if code == 0 and self._failed is None else "failed"
        at = self._running if outcome == "hung" or self._failed is None else self._failed
        return {"outcome": outcome, "test": at, "code": code, "events": self._events}

    def _end(self) -> int | None:
        """End whatever is left of it."""
        code = None
        gone, status = os.waitpid(self._process, os.WNOHANG)
        for _ in range(50):
            if gone:
                break
            time.sleep(0.02)
            gone, status = os.waitpid(self._process, os.WNOHANG)
        if gone:
            code = os.waitstatus_to_exitcode(status)
        end_descendants()
        return code


def _run_tests(tests: list[str], out: int, *, goes_on: bool) -> None:
    """In the fork: run pytest, and nothing after it."""
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        folder = Path.cwd()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # Ranks that are started from here must not take this module for the program.
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv = ["pytest"]
        reporter = Reporter(os.fdopen(out, "wb"), folder)

        from tests.mutants.ranks import fork_ranks_from_here

        fork_ranks_from_here()
        import pytest

        # What is imported already cannot be rewritten by pytest, which it says as a warning.
        calm = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        options = ["-q", "-W", calm, "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "--timeout=0"]
        code = int(pytest.main([*options, *([] if goes_on else ["-x"]), *tests], plugins=[reporter]))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def end_descendants() -> None:
    """Kill and reap all that this process started, whoever has become its parent."""
    for _ in range(100):
        found = psutil.Process().children(recursive=True)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not found:
            return
        time.sleep(0.02)


def _pytest_modules() -> list[str]:
    """pytest's own parts and installed plugins, which take most of a short run's time."""
    from _pytest.config import default_plugins

    installed = [plugin.value for plugin in entry_points(group="pytest11")]
    return [*(f"_pytest.{name}" for name in default_plugins), *installed]


def _end_with_parent() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    owner = os.getpid()

    def leave(*_: object) -> None:
        if os.getpid() == owner:
            end_descendants()
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Serve."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in (*_pytest_modules(), *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    loaded = [name for name in sys.modules if name.split(".")[0] == "mpc_dist"]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already, so its faults would not be seen")
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = Run(job["tests"], job["limits"], goes_on=job["goes_on"]).follow()
        print(json.dumps(answer), file=answers, flush=True)
    end_descendants()


if __name__ == "__main__":
    main()
