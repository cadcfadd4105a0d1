"""The host's time per action of the executor: forward, backward, input half and weight half of tiny blocks.

Beside them stands what torch alone takes for the same blocks, called by hand, which no executor can be below. Another
checkout can be measured, too: this file runs alone, on whatever `mpc_dist` it finds.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from mpc_dist.bench.rows import Row
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.task import Task
from mpc_dist.windows import backprop

STEPS, WARM_UP = 60, 10
WIDTH, CONTEXT, SAMPLES, NUM_MICROBATCHES, NUM_BLOCKS = 32, 16, 8, 4, 6
TORCH_ALONE = "torch alone"
KINDS = ("forward", "split forward", "backward", "input_half", "weight_half", "update")


def build_blocks() -> Chain:
    """Tiny GPT blocks, after one that has the embedding."""
    torch.set_num_threads(1)
    blocks = GPT(num_blocks=NUM_BLOCKS + 1, width=WIDTH, num_heads=2)
    return build_chain(blocks, Task("tokens", (CONTEXT,), 32), boundaries=[NUM_BLOCKS + 1])


def time_actions() -> dict[str, float]:
    """Median seconds of each kind of action."""
    chain = build_blocks()
    tokens, labels = torch.randint(0, 32, (2, SAMPLES, CONTEXT), generator=torch.Generator().manual_seed(0))
    layout = lay_out(backprop(NUM_BLOCKS + 1), (1, NUM_BLOCKS))  # a first stage has no input half
    found: dict[str, list[float]] = {}
    for split in (False, True):
        pipeline = InProcessPipeline(
            chain,
            layout,
            build_schedule(layout, NUM_MICROBATCHES, split=split),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            options=StageOptions(record_times=True),
        )
        for step in range(WARM_UP + STEPS):
            _, record = pipeline.step(tokens, labels)
            for interval in record.timeline if step >= WARM_UP else ():
                kind = interval.action.op.name.lower()
                kind = "split forward" if split and kind == "forward" else kind
                found.setdefault(kind, []).append(interval.end - interval.start)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def time_torch_alone() -> dict[str, float]:
    """What of these actions torch itself takes; of a weight half, what a whole backward takes beside the input's."""
    blocks = list(build_blocks().blocks)[1:]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    state, adjoint = torch.randn(2, SAMPLES // NUM_MICROBATCHES, CONTEXT, WIDTH)
    found: dict[str, list[float]] = {"forward": [], "backward": [], "input_half": []}

    def run_forward() -> tuple[Tensor, Tensor]:
        source = output = state.detach().requires_grad_()
        for block in blocks:
            output = block(output)
        return source, output

    for _ in range(WARM_UP + NUM_MICROBATCHES * STEPS):
        start = time.perf_counter()
        source, output = run_forward()
        between = time.perf_counter()
        torch.autograd.backward([output], [adjoint], inputs=[*parameters, source])
        end = time.perf_counter()
        found["forward"].append(between - start)
        found["backward"].append(end - between)
        source, output = run_forward()
        start = time.perf_counter()
        torch.autograd.grad([output], [source], [adjoint], retain_graph=True)
        found["input_half"].append(time.perf_counter() - start)
    medians = {kind: statistics.median(seconds[WARM_UP:]) for kind, seconds in found.items()}
    rest = {"split forward": medians["forward"], "weight_half": medians["backward"] - medians["input_half"]}
    return {**medians, **rest}


def bench_actions(checkouts: dict[str, Path], repeats: int) -> list[Row]:
    """The times in each checkout, by name, and in torch alone, processes alternating; `ratio` is of the first to it."""
    first = next(iter(checkouts))
    found: dict[str, dict[str, list[float]]] = {name: {} for name in (*checkouts, TORCH_ALONE)}
    for repeat in range(repeats):
        # Whoever comes first in a round may find the machine in another state: everyone in turn.
        turn = repeat % len(found)
        for name in [*found][turn:] + [*found][:turn]:
            folder = checkouts.get(name, checkouts[first])
            environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, *([TORCH_ALONE] if name == TORCH_ALONE else [])]
            printed = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, timeout=300
            ).stdout
            for kind, seconds in json.loads(printed).items():
                found[name].setdefault(kind, []).append(seconds)
    rows = []
    for kind in KINDS:
        for name, times in ((name, by_kind[kind]) for name, by_kind in found.items() if kind in by_kind):
            ratios = [ours / theirs for ours, theirs in zip(found[first][kind], times, strict=True)]
            extra = {"action": kind, "ratio": statistics.median(ratios)}
            is_split = kind not in ("forward", "backward", "update")
            settings = {"windows": "backprop", "split": is_split, "stages": 1, "microbatches": NUM_MICROBATCHES}
            rows.append(Row.of_times(times, system=name, **settings, extra=extra))
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(time_torch_alone() if TORCH_ALONE in sys.argv else time_actions()))
