"""Runs the real entry points in this process, bounded in time and memory, up to the first training step."""

import contextlib
import io
import resource
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from mpc_dist import cli
from mpc_dist.training import loop
from tests.conftest import ROOT

CPU_SECONDS = 20.0
"""More than any input may take; of the processor, as the machine may have ten other things to do."""
SECONDS = 150.0
"""For what waits without working."""
EXTRA_BYTES = 4 << 30
"""Address space that a case may take beyond what the process has."""
LONGEST_LINE = 1_500
"""Characters of an error; a terminal shows that much."""


class Started(BaseException):
    """The input is valid: the first training step would begin now."""


class Hung(BaseException):
    """The alarm rang."""


@dataclass(frozen=True)
class Answer:
    """What a command did with an input."""

    code: int | None
    """Its exit code; None if it raised."""
    error: str
    """What it wrote to the error stream."""
    failure: str | None
    """What no input may cause: a traceback, a hang, several lines; None if all is well."""

    @property
    def is_valid(self) -> bool:
        """Whether the input was taken."""
        return self.code == 0


def train(*argv: str) -> Answer:
    """`launch/train.py` with these arguments, until its first step."""
    return _run(_train_main(), ["train.py", *argv])


def mpc_dist(*argv: str) -> Answer:
    """The `mpc-dist` command with these arguments; what it trains stops at the first step."""
    return _run(cli.main, ["mpc-dist", *argv])


@cache
def _train_main() -> Any:
    return runpy.run_path(str(ROOT / "launch" / "train.py"))["main"]


def _run(main: Any, argv: Sequence[str]) -> Answer:
    error, code, failure = io.StringIO(), None, None
    try:
        with (
            _bounded(),
            contextlib.redirect_stderr(error),
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(sys, "argv", list(argv)),
            mock.patch.object(loop.Loop, "_train_step", _stop),
        ):
            code = main()
    except Started:
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except Hung:
        failure = "it hung"
    except BaseException:
        failure = traceback.format_exc()
    return Answer(code, error.getvalue(), failure or _find_fault(code, error.getvalue()))


def _find_fault(code: int | None, error: str) -> str | None:
    if "Traceback" in error:
        return f"a traceback: {error}"
    if code not in (0, 2):
        return f"exit code {code}: {error}"
    if code == 0:
        return None
    lines = error.splitlines()
    if lines and lines[0].startswith("usage:"):
        return None  # argparse's own: the usage, then one line
    said = [line for line in lines if ": error: " in line]
    if len(said) != 1 or not error.endswith("\n") or lines[-1] != said[0]:
        return f"not one line: {error!r}"
    return f"a line of {len(said[0])} characters: {said[0][:300]}" if len(said[0]) > LONGEST_LINE else None


def _stop(*_: object, **__: object) -> None:
    raise Started


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {alarm: signal.signal(alarm, _ring) for alarm in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + EXTRA_BYTES, limits[1]))
    timers = {signal.ITIMER_REAL: SECONDS, signal.ITIMER_PROF: CPU_SECONDS}
    for timer, seconds in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for alarm, handler in handlers.items():
            signal.signal(alarm, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise Hung


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
