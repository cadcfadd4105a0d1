"""Runs tests in an overlay through its server, and starts the server again if it dies."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.mutants.overlay import Overlay


@dataclass(frozen=True)
class Outcome:
    """What became of a run of tests."""

    kind: str
    """passed, failed or hung"""
    test: str | None
    """The test that failed or hung."""
    events: tuple[tuple[Any, ...], ...]
    """What happened, in order: (start, test), (failed, test), (skipped, test), (end, test, seconds), …"""
    code: int | None
    """pytest's exit code, None if it was killed."""


class Client:
    """The near end of a server; a context, at whose end the server and all its processes are gone."""

    def __init__(self, root: Path, folder: Path, sources: Sequence[str], preload: Sequence[str]) -> None:
        self._preload = preload
        self.overlay = Overlay(root, folder, sources)
        self._start()

    def run(self, tests: Sequence[str], limits: Mapping[str, float], *, goes_on: bool = False) -> Outcome:
        """Run these tests in this order, to the first that fails, each within its seconds; or all of them."""
        assert self._server.stdin is not None
        job = {"tests": list(tests), "limits": dict(limits), "goes_on": goes_on}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = self._read()
        self.overlay.tidy()
        return Outcome(answer["outcome"], answer["test"], tuple(map(tuple, answer["events"])), answer["code"])

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.terminate()
        self._server.wait(60)
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.server", *self._preload],
            cwd=self.overlay.folder,
            env=self.overlay.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {self.overlay.folder} has ended with code {self._server.wait(60)}")
        return json.loads(line)
