"""`bench.py compile`: the first step and later ones of a GPT whose blocks are compiled, beside the same as written."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from mpc_dist.bench.rows import Row
from mpc_dist.models import GPT, build_chain
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.task import Task
from mpc_dist.windows import Windows, backprop, sliding

VOCABULARY = 64
AS_WRITTEN, COMPILED = "as written", "compiled"


@dataclass(frozen=True)
class CompileSetting:
    """What is measured, in one process: two stages that take turns, the first of one block."""

    num_blocks: int = 6
    width: int = 32
    context: int = 16
    batch_size: int = 8
    num_microbatches: int = 4
    repeats: int = 7
    """Rounds in which the two alternate."""
    steps: int = 5
    """Timed steps of each part of a round."""


def bench_compile(setting: CompileSetting) -> list[Row]:
    """Rows by windows, with the seconds of the first step and the ratio of step times."""
    torch.set_num_threads(1)
    rows = []
    cases: dict[str, tuple[Windows, bool]] = {
        "backprop": (backprop(setting.num_blocks), False),
        "backprop, split": (backprop(setting.num_blocks), True),
        "sliding:1": (sliding(setting.num_blocks, 1), False),
        "sliding:2": (sliding(setting.num_blocks, 2), False),
    }
    tokens, labels = torch.randint(
        0, VOCABULARY, (2, setting.batch_size, setting.context), generator=torch.Generator().manual_seed(0)
    )
    for name, (windows, split) in cases.items():
        torch._dynamo.reset()
        with fresh_cache():  # the first step of every case is that of a new model
            pipelines = {
                system: _build(setting, windows, split=split, compiles=system == COMPILED)
                for system in (AS_WRITTEN, COMPILED)
            }
            first = {system: _time(pipeline, tokens, labels, 1) for system, pipeline in pipelines.items()}
            times: dict[str, list[float]] = {system: [] for system in pipelines}
            for _ in range(setting.repeats):
                for system, pipeline in pipelines.items():
                    times[system].append(_time(pipeline, tokens, labels, setting.steps))
        for system, own in times.items():
            ratios = [before / after for before, after in zip(times[AS_WRITTEN], own, strict=True)]
            extra = {"first step s": first[system], "as written / this": statistics.median(ratios)}
            settings = {"system": system, "windows": name.partition(",")[0], "split": split, "stages": 2}
            rows.append(Row.of_times(own, microbatches=setting.num_microbatches, extra=extra, **settings))
    return rows


def _build(setting: CompileSetting, windows: Windows, *, split: bool, compiles: bool) -> InProcessPipeline:
    num_blocks = setting.num_blocks
    model = GPT(num_blocks=num_blocks, width=setting.width, num_heads=2)
    chain = build_chain(model, Task("tokens", (setting.context,), VOCABULARY))
    layout = lay_out(windows, (1, num_blocks - 1))

    def build_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    schedule = build_schedule(layout, setting.num_microbatches, split=split)
    return InProcessPipeline(chain, layout, schedule, optimizer=build_optimizer, options=StageOptions(compile=compiles))


def _time(pipeline: InProcessPipeline, tokens: Tensor, labels: Tensor, num_steps: int) -> float:
    """Seconds of a step."""
    start = time.perf_counter()
    for _ in range(num_steps):
        pipeline.step(tokens, labels)
    return (time.perf_counter() - start) / num_steps
