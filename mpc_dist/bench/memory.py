"""`bench.py memory`: peak live activation bytes per rank against the horizon, counted while a pipeline runs."""

import torch

from mpc_dist.bench.rows import Row
from mpc_dist.models import GPT, build_chain
from mpc_dist.profile import SavedBytes
from mpc_dist.runtime.in_process import InProcessPipeline
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.task import Task
from mpc_dist.windows import sliding


def bench_memory(*, num_stages: int, num_microbatches: int, width: int, context: int) -> list[Row]:
    """A gpt of one block per stage; each rank's bytes are counted as its own graphs are made and freed."""
    task = Task("tokens", (context,), 256)
    shape = (2, 2 * num_microbatches, context)
    inputs, labels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    rows = []
    for horizon in range(1, num_stages + 1):
        layout = lay_out(sliding(num_stages, horizon), [1] * num_stages)
        chain = build_chain(GPT(num_blocks=num_stages, width=width), task, boundaries=layout.windows.readouts)
        schedule = build_schedule(layout, num_microbatches)
        pipeline = InProcessPipeline(
            chain, layout, schedule, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)
        )
        meters = [SavedBytes([*chain.parameters(), inputs, labels]) for _ in range(num_stages)]
        records = pipeline.step(inputs, labels, contexts=meters)
        peaks = [meter.peak for meter in meters]
        rows.append(
            Row.of_times(
                [0.0],
                system="mpc_dist",
                windows=f"sliding:{horizon}" if horizon < num_stages else "backprop",
                split=False,
                stages=num_stages,
                microbatches=num_microbatches,
                extra={
                    "peak MiB, worst rank": max(peaks) / 2**20,
                    "peak MiB, rank 0": peaks[0] / 2**20,
                    "in flight": max(record.most_in_flight for record in records),
                },
            )
        )
    return rows
