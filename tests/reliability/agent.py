"""Starts ranks and starts them all again when one fails, as torchrun's agent does, at a tenth of its price.

Ranks are forked from a server that has torch loaded. They meet through a store that this process keeps, a new one for
each attempt. When a rank ends with an error the others get SIGTERM and, after a while, SIGKILL.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.preemption import EXIT_PREEMPTED, Preempted
from mpc_dist.training import auto, job
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.config import Config
from tests.reliability.strike import PHASES, Strike, arm

PRELOADED = [__name__, "tests.reliability.strike", "mpc_dist.training.auto", "torch._dynamo"]
"""What the server has loaded that ranks are forked from."""
PATIENCE = 2.0
"""Seconds between SIGTERM and SIGKILL; torchrun's are 30."""
STOP_TIMEOUT = 8.0
"""Seconds that others wait for a rank that is stopped."""


@dataclass
class Attempt:
    """One start of all ranks."""

    exit_codes: list[int]
    errors: list[str]
    """What each rank wrote to its error stream."""
    last_checkpoint: int
    """The newest complete one in the folder when all ranks had ended; 0: none."""
    seconds_to_notice: float | None = None
    """From the strike to the first other rank, or the agent, that knew."""
    seconds_to_end: float | None = None
    """From the strike until all ranks had ended."""


@dataclass
class Outcome:
    """All attempts of a job."""

    attempts: list[Attempt] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        return all(code == 0 for code in self.attempts[-1].exit_codes)


def run_rank(
    rank: int,
    config: Config,
    port: int,
    attempt: int,
    strike: Strike | None,
    folder: Path,
    counts: bool,
    prepare: Callable[[int], None] | None,
) -> None:
    """What a process of a job does: as `launch/train.py`, with its exit codes."""
    errors = os.open(folder / f"errors-{attempt}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.stdout = (folder / f"output-{attempt}-{rank}").open("a")  # the bar of the progress
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    num_ranks = config.num_ranks
    phases = [] if strike is None or strike.rank != rank else [strike.phase]
    counters = arm(PHASES if counts else phases, strike, folder / f"struck-{attempt}")
    code = 1
    try:
        if prepare is not None:
            prepare(rank)
        if num_ranks > 1:
            store = TCPStore("127.0.0.1", port, num_ranks, is_master=False, timeout=timedelta(seconds=60))
            timeout = timedelta(seconds=config.parallel.timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        launch = Launch(rank, num_ranks, rank, job="test", attempt=attempt)
        auto.train = job.train  # the one that counts
        auto.train_as_planned(config, launch)
        code = 0
    except Preempted as stopped:
        sys.stderr.write(f"{stopped}\n")
        code = EXIT_PREEMPTED
    except BaseException:
        traceback.print_exc()
    (folder / f"counts-{attempt}-{rank}").write_text(repr({name: one.count for name, one in counters.items()}))
    sys.stderr.flush()
    os._exit(code)  # as a crash would: nothing of the server's is run


def run_job(
    config: Config,
    folder: Path,
    strikes: Sequence[Strike | None] = (),
    *,
    max_restarts: int = 4,
    deadline: float = 120.0,
    meanwhile: Callable[[list[Any]], None] | None = None,
    tells_others: bool = True,
    counts: bool = False,
    prepare: Callable[[int], None] | None = None,
) -> Outcome:
    """Run a job to its end, striking attempt i with `strikes[i]`; `meanwhile` gets the processes of the first attempt.

    Without `tells_others`, ranks are not told that another has ended, as on several hosts. With `counts`, the calls of
    all phases are counted. Every rank calls `prepare` with its number before it begins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    for number in range(max_restarts + 1):
        strike = strikes[number] if number < len(strikes) else None
        given = config
        if strike is not None and strike.signal == signal.SIGSTOP:
            # The others find out by waiting; elsewhere a busy machine must not be taken for a stopped rank.
            given = replace(config, parallel=replace(config.parallel, timeout=STOP_TIMEOUT))
        first = meanwhile if number == 0 else None
        attempt = _attempt(_Job(given, folder, number, strike, deadline, first, tells_others, counts, prepare))
        outcome.attempts.append(attempt)
        if outcome.succeeded or EXIT_PREEMPTED in attempt.exit_codes:
            break
    return outcome


@dataclass(frozen=True)
class _Job:
    config: Config
    folder: Path
    number: int
    strike: Strike | None
    deadline: float
    meanwhile: Callable[[list[Any]], None] | None
    tells_others: bool
    counts: bool
    prepare: Callable[[int], None] | None


def _attempt(job: _Job) -> Attempt:
    config, folder, number = job.config, job.folder, job.number
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, config.num_ranks, is_master=True, wait_for_workers=False)
    arguments = (config, store.port, number, job.strike, folder, job.counts, job.prepare)
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(config.num_ranks)]
    for process in ranks:
        process.start()
    noticed = None
    try:
        if job.meanwhile is not None:
            job.meanwhile(ranks)
        end = time.monotonic() + job.deadline
        while any(process.is_alive() for process in ranks):
            if time.monotonic() > end:
                alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
                raise TimeoutError(f"ranks {alive} hang: {job.strike}")
            if any(process.exitcode not in (None, 0) for process in ranks):
                noticed = noticed or time.time()
                if job.tells_others:
                    _stop(ranks)
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
    ended = time.time()
    note = folder / f"struck-{number}"
    struck = float(note.read_text()) if note.exists() else None
    checkpoints = list_checkpoints(folder_of(Path(config.training.folder)))
    return Attempt(
        [process.exitcode for process in ranks],
        [(folder / f"errors-{number}-{rank}").read_text() for rank in range(len(ranks))],
        step_of(checkpoints[-1]) if checkpoints else 0,
        None if struck is None or noticed is None else noticed - struck,
        None if struck is None else ended - struck,
    )


def _stop(ranks: list[Any]) -> None:
    for process in ranks:
        process.terminate()  # which does not mind that it may just have ended
    end = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join(10)
