"""`bench.py growth`: what each rank opens and connects, and how long it takes to begin, at ever more ranks.

Real processes with a stage of one small block each: they meet, take a step, save, go on from what was saved, and take
another step. All share this machine's cores, so the time of a rank's own work is told beside the time of all.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mpc_dist.bench.opens import Opens
from mpc_dist.bench.rows import Row
from mpc_dist.readout import Identity, mean_squared_error
from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh, leave
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.schedule import lay_out
from mpc_dist.training.checkpoint import CheckpointSaver, newest_undamaged
from mpc_dist.training.checkpoint_folder import list_checkpoints
from mpc_dist.windows import sliding

WIDTH = 8
HOST = "127.0.0.1"
BYTES_PER_RANK = 32 << 20
"""What a process takes beside what it shares with the others, which all are forked from one that has imported torch."""
TIMEOUT = timedelta(seconds=300)
MOST_SECONDS = 450.0
"""Of all ranks together, for one of the two parts."""


@dataclass(frozen=True)
class Begun:
    """What one rank needed to begin."""

    sockets: int
    """Open after a step and a checkpoint."""
    seconds: float
    """From the first line of its program to the end of its first step."""
    own_seconds: float
    """Of these, what its own threads computed."""


def count_sockets() -> int:
    """How many sockets this process has open, listening ones included (Linux)."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very list
            found += path.readlink().name.startswith("socket:")
    return found


def bench_growth(
    ranks: Sequence[int], plan: Callable[[int], float] | None = None, on_done: Callable[[int], None] = lambda _: None
) -> list[Row]:
    """A row for each number of ranks; `plan` tells the seconds of planning for so many."""
    check_memory(max(ranks), free_bytes())
    rows = []
    for num_ranks in ranks:
        rows.append(_measure(num_ranks, plan))
        on_done(num_ranks)
    return rows


def free_bytes() -> int:
    """What this machine can still give out (Linux)."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(found) << 10


def check_memory(num_ranks: int, free: int) -> None:
    """Raise if so many processes would take more than two thirds of what is free: others work here, too."""
    most = 2 * free // 3 // BYTES_PER_RANK
    if num_ranks > most:
        raise ValueError(f"{num_ranks} ranks need {num_ranks * BYTES_PER_RANK >> 20} MiB here; use at most {most}")


def _measure(num_ranks: int, plan: Callable[[int], float] | None) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        run = partial(run_local_ranks, timeout=MOST_SECONDS, group_timeout=TIMEOUT.total_seconds())
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # torchrun's, by which ranks meet
        begun = run(begin, num_ranks, num_ranks, store.port, folder)
        (checkpoint,) = list_checkpoints(Path(folder))
        with Opens(checkpoint) as opens:
            run(go_on, num_ranks, num_ranks, store.port, folder)
        size = sum(path.stat().st_size for path in checkpoint.iterdir())
    return Row.of_times(
        [max(one.seconds for one in begun)],
        system="gloo",
        windows="horizon 1",
        split=False,
        stages=num_ranks,
        microbatches=1,
        extra={
            "most_sockets": max(one.sockets for one in begun),
            "opens_per_rank": opens.count.total() / num_ranks,
            "own_seconds": max(one.own_seconds for one in begun),
            "checkpoint_bytes": size,
            **({} if plan is None else {"planning_seconds": plan(num_ranks)}),
        },
    )


def begin(rank: int, num_ranks: int, port: int, folder: str) -> Begun:
    """Meet the others, take a step and save."""
    started, computed = time.perf_counter(), time.process_time()
    mesh, pipeline = _connect(rank, num_ranks, port)
    pipeline.step(*_batch())
    seconds, own_seconds = time.perf_counter() - started, time.process_time() - computed
    saver = CheckpointSaver(Path(folder), keep=1, fingerprint={}, rank=rank, group=mesh.background)
    saver.save(1, pipeline.collect_state(), {})
    saver.wait()
    (outcome,) = saver.take_outcomes()
    assert outcome.failure is None, outcome.failure
    pipeline.close()
    sockets = count_sockets()
    dist.barrier(mesh.background)  # nobody leaves while another still counts
    return Begun(sockets, seconds, own_seconds)


def go_on(rank: int, num_ranks: int, port: int, folder: str) -> None:
    """Meet the others and go on from what was saved."""
    mesh, pipeline = _connect(rank, num_ranks, port)
    saved, damages = newest_undamaged(list_checkpoints(Path(folder)), rank=rank, group=mesh.background)
    assert saved is not None, damages
    pipeline.connect(*_batch())
    assert pipeline.restore_state(saved, step=1) == []
    pipeline.step(*_batch())
    pipeline.close()


def _connect(rank: int, num_ranks: int, port: int) -> tuple[Mesh, Pipeline]:
    leave()  # the group of `run_local_ranks`: met in a file
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    mesh = build_mesh(Launch(rank, num_ranks, rank), num_stages=num_ranks, timeout=TIMEOUT)
    pipeline = Pipeline(
        mesh,
        lay_out(sliding(num_ranks, 1), [1] * num_ranks),
        build_block=lambda _: nn.Linear(WIDTH, WIDTH),
        build_readout=lambda _: Identity(),
        loss=mean_squared_error,
        optimizer=torch.optim.AdamW,
        timeout=TIMEOUT,
    )
    return mesh, pipeline


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, WIDTH), torch.zeros(2, WIDTH)


def write_page(rows: Sequence[Row]) -> str:
    """The table as a page of the documentation."""
    has_plans = all("planning_seconds" in row.extra for row in rows)
    head = ["ranks", "sockets per rank (most)", "opens per rank to go on", "start to end of step 1 (s)"]
    head += ["of these, a rank's own (s)", "state and tensors of a checkpoint (kB)"]
    head += ["planning (s)"] if has_plans else []
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [f"{row.stages}", f"{row.extra['most_sockets']:.0f}", f"{row.extra['opens_per_rank']:.1f}"]
        cells += [
            f"{row.step_seconds:.2f}",
            f"{row.extra['own_seconds']:.2f}",
            f"{row.extra['checkpoint_bytes'] / 1e3:.0f}",
        ]
        cells += [f"{row.extra['planning_seconds']:.1f}"] if has_plans else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
