"""Starts ranks on this machine (gloo, or NCCL on GPUs), bounds their time, and re-raises what a rank raised."""

import gc
import io
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpc_dist.runtime.mesh import Launch, connect_on_use, use_device

IMPORTED_BY_STEPS = ("torch._dynamo",)
"""What the first step of any torch optimizer imports: a second and 100 MB, of every rank or once for all."""


class LocalRankError(RuntimeError):
    """A rank raised, died or did not finish in time."""


def run_local_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout: float = 120.0,
    group_timeout: float = 30.0,
    may_fail: bool = False,
    device_type: str = "cpu",
) -> list[Any]:
    """Call `function(rank, *arguments)` on every rank of a process group; return what each returned.

    With `may_fail`, a rank that raised gives its exception's text instead, and one that died None.
    """
    # The server imports torch once and forks each rank from there: eight ranks start in 0.2 s instead of 8 s.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTED_BY_STEPS, function.__module__])
    results: Queue[tuple[int, bool, Any]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=_run_rank,
                args=(function, rank, num_ranks, store, group_timeout, device_type, arguments, results),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        with nullcontext() if function.__module__ == "__main__" else _without_script():
            for process in ranks:
                process.start()
        try:
            return _collect(ranks, results, time.monotonic() + timeout, may_fail)
        finally:
            for process in ranks:
                process.kill()
                process.join(10)


@contextmanager
def _without_script() -> Iterator[None]:
    """Let processes start without the script that this one runs: each would import all that it imports, again."""
    script = sys.modules["__main__"]
    hidden = {name: getattr(script, name, None) for name in ("__file__", "__spec__")}
    for name in hidden:
        setattr(script, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(script, name, value)


def _collect(ranks: list[Any], results: Any, deadline: float, may_fail: bool) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        try:
            rank, succeeded, answer = results.get(timeout=0.2)
        except queue.Empty:
            dead = [
                rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0) and rank not in answers
            ]
            if dead and not may_fail:
                raise LocalRankError(f"rank {dead[0]} died with exit code {ranks[dead[0]].exitcode}") from None
            answers |= dict.fromkeys(dead)
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(ranks))) - set(answers))
                raise LocalRankError(f"ranks {missing} did not finish in time") from None
            continue
        if not succeeded and not may_fail:
            raise LocalRankError(f"rank {rank} raised:\n{answer}")
        # Tensors come as bytes: shared memory would be gone with the process that made them.
        answers[rank] = torch.load(io.BytesIO(answer), weights_only=False) if succeeded else answer
    return [answers[rank] for rank in range(len(ranks))]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: str,
    group_timeout: float,
    device_type: str,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    gc.freeze()  # to collect what is shared with the process it was forked from would copy all of it
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # loopback only
    torch.set_num_threads(1)
    connect_on_use()
    try:
        use_device(Launch(rank, num_ranks, rank), device_type)
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=group_timeout),
        )
        answer = function(rank, *arguments)
        saved = io.BytesIO()
        torch.save(answer, saved)
        results.put((rank, True, saved.getvalue()))
        if dist.is_initialized():  # the function may have left the group itself
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
