"""Reads what one rank uses of each batch, ahead, in processes of its own where reading is work.

The processes begin anew, with nothing open but two pipes: they hold no port, no GPU and no file of the rank, and end
when their input does, however the rank ends.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpc_dist.data.dataset import Selection, Split

MOST_WORKERS = 4
"""Processes, if their number is left open."""
BATCHES_PER_WORKER = 2
"""How far ahead is read: one batch is at work, one waits."""
_HELD_BACK = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
"""Signals that are for the rank alone: it goes on for a few steps and then ends its processes."""
_BEGIN = f"import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from {__name__} import main; main()"
"""A process imports what the rank does, from where the rank does."""


@dataclass(frozen=True)
class Use:
    """What a rank uses of a batch."""

    inputs: bool = True
    labels: bool = True


@dataclass(frozen=True)
class Part:
    """What a rank has read of a batch; None where it uses nothing."""

    inputs: Tensor | None
    labels: Tensor | None
    num_samples: int

    def to(self, dtype: torch.dtype) -> "Part":
        """The same with real values in that precision; labels in float32 at least, as losses are."""
        inputs, labels = (
            value.to(kind) if value is not None and value.is_floating_point() else value
            for value, kind in ((self.inputs, dtype), (self.labels, torch.promote_types(dtype, torch.float32)))
        )
        return Part(inputs, labels, self.num_samples)


def choose_workers(split: Split, wanted: int | None) -> int:
    """How many processes read ahead: as many as wanted, or by what the data is."""
    if wanted is not None:
        return wanted
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(MOST_WORKERS, num_cores) if split.is_decoded else 0


class Reader:
    """Reads from several splits with the same processes; without any, in the caller's thread when it is asked."""

    def __init__(self, splits: Mapping[str, Split], *, num_workers: int) -> None:
        self._splits = dict(splits)
        self._num_ahead = BATCHES_PER_WORKER * num_workers
        self._workers = [_Worker(self._splits) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        # A thread only waits for its process: what a process has read must be taken from it while the rank computes.
        self._threads = ThreadPoolExecutor(num_workers, "data") if num_workers else None

    def read(self, name: str, selections: Iterable[Selection], use: Use) -> Iterator[Part]:
        """What is used of each batch, in order."""
        begun: deque[Callable[[], Part]] = deque()
        for selection in selections:
            begun.append(self._begin(name, selection, use))
            if len(begun) > self._num_ahead:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def close(self) -> None:
        """End the processes; what is being read is dropped."""
        if self._threads is None:
            return
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, name: str, selection: Selection, use: Use) -> Callable[[], Part]:
        split, inputs = self._splits[name], None
        if use.inputs and self._threads is not None:
            inputs = self._threads.submit(self._ask, name, selection).result
        elif use.inputs:
            inputs = partial(split.read_inputs, selection.indices, selection.noise)

        def finish() -> Part:
            labels = split.read_labels(selection.indices) if use.labels else None
            return Part(None if inputs is None else inputs(), labels, selection.num_samples)

        return finish

    def _ask(self, name: str, selection: Selection) -> Tensor:
        worker = self._idle.get()
        try:
            return worker.ask(name, selection)
        finally:
            self._idle.put(worker)


class _Worker:
    """A process that reads inputs."""

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self._splits: Mapping[str, Split] | None = splits
        # A process inherits the signals that are held back. In a session of its own it does not get the launcher's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BEGIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ask(self, name: str, selection: Selection) -> Tensor:
        """The inputs of these samples."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._splits is not None:
                pickle.dump(sys.path, self._process.stdin)
                pickle.dump(self._splits, self._process.stdin)
                self._splits = None
            pickle.dump((name, selection), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)  # our own process
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            raise OSError(
                f"a process that reads the data ahead ended with exit code {code} (-9: killed, maybe for want of "
                "memory); use fewer training.workers, or 0"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return torch.from_numpy(answer)

    def kill(self) -> None:
        """End the process at once: it holds nothing that is worth an orderly end."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes, once nobody asks any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a request may be in it that was never sent
                pipe.close()


def main() -> None:
    """Answer requests from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the answers
    torch.set_num_threads(1)
    requests = sys.stdin.buffer
    try:
        splits: Mapping[str, Split] = pickle.load(requests)
        while True:
            name, selection = pickle.load(requests)
            pickle.dump(_read(splits[name], selection), answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the rank is gone, or wants no more


def _read(split: Split, selection: Selection) -> Any:
    """The inputs, or what went wrong: the rank raises it as if it had read them itself."""
    try:
        return split.read_inputs(selection.indices, selection.noise).numpy()
    except (ValueError, OSError) as error:  # what is told in a line
        return error
    except Exception:
        return RuntimeError(f"reading data failed in a process of its own:\n{traceback.format_exc()}")
