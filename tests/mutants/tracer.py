"""Which lines each test runs, in whatever process: every line is written down when it is first run.

A rank may be killed, so nothing is kept for the end. `start` also serves processes that are started from anew: the
overlay's `sitecustomize.py` calls it.
"""

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CONTEXT = "trace-context"
"""In the overlay: what is running now, as text; tracing is on where this file is there."""
LINES = "trace-lines"
"""In the overlay: a line `context <tab> file <tab> line` for every line that is run."""
FRUITLESS = 300
"""A function is left alone after so many calls without a new line: following each line of each call is slow."""


class Tracer:
    """Follows this process and those that it forks."""

    def __init__(self, overlay: Path, sources: frozenset[str]) -> None:
        self._overlay = str(overlay) + os.sep
        self._sources = sources
        self._context_path = overlay / CONTEXT
        self._file = os.open(overlay / LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._wanted: dict[CodeType, str | None] = {}
        self.enter(self._read_context())

    def enter(self, context: str) -> None:
        """From now on, lines belong to this."""
        self._context = context
        self._seen: dict[CodeType, set[int]] = {}
        self._fruitless: dict[CodeType, int] = {}

    def follow(self) -> None:
        """Begin, in this thread and in those to come."""
        os.register_at_fork(after_in_child=lambda: self.enter(self._read_context()))
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _read_context(self) -> str:
        try:
            return self._context_path.read_text()
        except OSError:
            return ""

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        try:
            name = self._wanted[code]
        except KeyError:
            path = code.co_filename.removeprefix(self._overlay)
            name = self._wanted[code] = path if path in self._sources else None
        if name is None:
            return None
        seen = self._seen.setdefault(code, set())
        calls = self._fruitless.get(code, 0)
        if calls > FRUITLESS:
            return None
        self._fruitless[code] = calls + 1

        def see(frame: FrameType, event: str, argument: object) -> Any:
            line = frame.f_lineno
            if event == "line" and line not in seen:
                seen.add(line)
                self._fruitless[code] = 0
                os.write(self._file, f"{self._context}\t{name}\t{line}\n".encode())
            return see

        return see


def start(overlay: Path) -> Tracer | None:
    """Follow this process if the overlay asks for it."""
    if not (overlay / CONTEXT).exists():
        return None
    sources = frozenset((overlay / "trace-sources").read_text().split("\n"))
    tracer = Tracer(overlay, sources)
    tracer.follow()
    return tracer
