"""Runs the cells of an experiment side by side, one thread each, and keeps each result as it comes.

Cells whose result is a time on the clock run first, one by one, with nothing beside them.

Interrupted at any point, the same call goes on: cells that are in the store are not run again.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mpc_dist.study.cell import Cell, Record, Result, Store


def run_cells(
    cells: Mapping[str, Cell], store: Store, *, num_workers: int, title: str, console: Console
) -> dict[str, Record]:
    """Run what the store lacks, `num_workers` at a time; every cell's record by its name."""
    left = {name: cell for name, cell in cells.items() if store.find(cell) is None}
    alone = {name: cell for name, cell in left.items() if getattr(cell, "runs_alone", False)}
    others = {name: cell for name, cell in left.items() if name not in alone}
    num_done = len(cells) - len(left)
    if alone:
        _run(alone, store, num_workers=1, title=title, console=console, num_done=num_done)
    if others:
        _run(others, store, num_workers=num_workers, title=title, console=console, num_done=num_done + len(alone))
    return collect(cells, store)


def collect(cells: Mapping[str, Cell], store: Store) -> dict[str, Record]:
    """The records of those cells that were run, by name."""
    found = {name: store.find(cell) for name, cell in cells.items()}
    return {name: record for name, record in found.items() if record is not None}


def _run(
    cells: Mapping[str, Cell], store: Store, *, num_workers: int, title: str, console: Console, num_done: int
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Forked from a server that has torch loaded: a fork of this process would inherit its threads half alive.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *{type(cell).__module__ for cell in cells.values()}])
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin) as pool,
    ):
        bar = progress.add_task(title, total=num_done + len(cells), completed=num_done)
        running: dict[Future[tuple[Result, float]], str] = {}
        queue = list(cells.items())
        try:
            while queue or running:
                while queue and len(running) < num_workers:
                    name, cell = queue.pop(0)
                    running[pool.submit(_measure, cell)] = name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name = running.pop(future)
                    result, seconds = future.result()
                    store.add(name, cells[name], result, seconds=seconds)
                    progress.update(bar, advance=1, description=f"{title}: {name}")
        except BaseException:
            for process in (pool._processes or {}).values():
                process.terminate()
            raise


def _begin() -> None:
    """A worker has one thread, and ends with the experiment even if that is killed."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # nobody is left to take the result


def _measure(cell: Cell) -> tuple[Result, float]:
    start = time.process_time()
    result = cell.run()
    return result, time.process_time() - start
