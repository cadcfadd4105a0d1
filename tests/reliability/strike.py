"""Strikes a rank at a chosen place of a chosen phase: by counting the calls that its thread makes there.

A place is the number of a call since the phase was first entered, so a seeded choice hits anything that Python does:
an action of the schedule, a message, a file operation. Nothing of this lives in the product.
"""

import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpc_dist.runtime.executor import Executor
from mpc_dist.training import job
from mpc_dist.training.checkpoint import CheckpointSaver
from mpc_dist.training.loop import Loop

PHASES = START, ACTIONS, SAVE, EVALUATION, HORIZON = "start-up", "actions", "save", "evaluation", "horizon change"


@dataclass(frozen=True)
class Strike:
    """What befalls a rank."""

    phase: str
    rank: int
    place: int
    """The call of that phase at which it is struck, from 1."""
    signal: signal.Signals


class Counter:
    """Counts the calls of a phase in this process, over all times that it is entered; strikes at one of them."""

    def __init__(self, strike: Strike | None, note: Path) -> None:
        self.count = 0
        self._strike = strike
        self._note = note

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self.count += 1
        if self._strike is not None and self.count == self._strike.place:
            sys.setprofile(None)
            self._note.write_text(str(time.time()))
            os.kill(os.getpid(), self._strike.signal)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            sys.setprofile(self)
            try:
                return function(*arguments, **options)
            finally:
                sys.setprofile(None)

        return counted


def arm(phases: Iterable[str], strike: Strike | None, note: Path) -> dict[str, Counter]:
    """Count the calls of these phases and strike, if at all, in one of them; `note` is written just before."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counters = {phase: Counter(strike, note) for phase in phases}
    loop: Any = Loop
    for phase, counter in counters.items():
        if phase == ACTIONS:
            Executor.run = counter.around(Executor.run)  # type: ignore[method-assign]
        elif phase == SAVE:
            CheckpointSaver._write = counter.around(CheckpointSaver._write)  # type: ignore[method-assign]
        elif phase == EVALUATION:
            loop._evaluate = counter.around(loop._evaluate)
        elif phase == HORIZON:
            loop._adapt = counter.around(loop._adapt)
        else:
            _count_start(loop, counter)
    return counters


def _count_start(loop: Any, counter: Counter) -> None:
    """From the call of `train` to the first step, but for what the parts above count."""
    train, write_start = job.train, loop._write_start

    def begin(*arguments: Any, **options: Any) -> Any:
        sys.setprofile(counter)
        return train(*arguments, **options)

    def end(self: Any) -> None:
        write_start(self)
        sys.setprofile(None)

    job.train = begin
    loop._write_start = end
