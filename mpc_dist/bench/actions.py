"""The host's time per action of the executor: forward, backward, input half and weight half of tiny blocks.

Another checkout can be measured beside this one: this file runs alone, on whatever `mpc_dist` it finds.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from mpc_dist.bench.rows import Row
from mpc_dist.models import GPT, build_chain
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.task import Task
from mpc_dist.windows import backprop

STEPS, WARM_UP = 60, 10


def time_actions() -> dict[str, float]:
    """Median seconds of each kind of action, on a stage of 6 tiny GPT blocks with 4 micro-batches."""
    torch.set_num_threads(1)
    task = Task("tokens", (16,), 32)
    chain = build_chain(GPT(num_blocks=7, width=32, num_heads=2), task, boundaries=[7])
    tokens, labels = torch.randint(0, 32, (2, 8, 16), generator=torch.Generator().manual_seed(0))
    layout = lay_out(backprop(7), (1, 6))  # a first stage has no input half
    found: dict[str, list[float]] = {}
    for split in (False, True):
        pipeline = InProcessPipeline(
            chain,
            layout,
            build_schedule(layout, 4, split=split),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            options=StageOptions(record_times=True),
        )
        for step in range(WARM_UP + STEPS):
            _, record = pipeline.step(tokens, labels)
            for interval in record.timeline if step >= WARM_UP else ():
                kind = interval.action.op.name.lower()
                found.setdefault(kind, []).append(interval.end - interval.start)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def bench_actions(checkouts: dict[str, Path], repeats: int) -> list[Row]:
    """The times in each checkout, by name, processes alternating; `ratio` is of the first to this one."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for _ in range(repeats):
        for name, folder in checkouts.items():
            environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
            printed = subprocess.run(
                [sys.executable, __file__], env=environment, check=True, capture_output=True, text=True, timeout=300
            ).stdout
            for kind, seconds in json.loads(printed).items():
                found[name].setdefault(kind, []).append(seconds)
    first = next(iter(checkouts))
    rows = []
    for kind in found[first]:
        for name, times in ((name, by_kind[kind]) for name, by_kind in found.items()):
            ratios = [ours / theirs for ours, theirs in zip(found[first][kind], times, strict=True)]
            extra = {"action": kind, "ratio": statistics.median(ratios)}
            is_half = kind.endswith("half")
            settings = {"windows": "backprop", "split": is_half, "stages": 1, "microbatches": 4, "extra": extra}
            rows.append(Row.of_times(times, system=name, **settings))
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(time_actions()))
