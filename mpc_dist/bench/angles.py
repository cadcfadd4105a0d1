"""`bench.py angles`: the angle of every horizon of a gpt, one pass for all against each horizon separately."""

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from mpc_dist.bench.rows import Row
from mpc_dist.gradient import Gradients, eager_mpc_gradients, mpc_gradients
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.profile import measure_angles
from mpc_dist.task import Task
from mpc_dist.windows import sliding


def bench_angles(*, blocks: int, width: int, context: int, batch_size: int, repeats: int) -> list[Row]:
    """Time each way; the first is the one that the others are compared with."""
    task = Task("tokens", (context,), 256)
    model = build_chain(GPT(num_blocks=blocks, width=width), task, readout="shared")
    inputs, labels = torch.randint(0, 256, (2, batch_size, context), generator=torch.Generator().manual_seed(0))

    def separately(compute: Callable[..., Gradients]) -> list[float]:
        exact = _flatten(compute(model, inputs, labels, sliding(blocks, blocks)), model)
        cosines = []
        for horizon in range(1, blocks):
            ours = _flatten(compute(model, inputs, labels, sliding(blocks, horizon)), model)
            cosines.append(float(torch.nn.functional.cosine_similarity(ours, exact, dim=0)))
        return [*cosines, 1.0]

    systems: dict[str, Callable[[], list[float]]] = {
        "one pass": lambda: measure_angles(model, [(inputs, labels)]).horizon_cosines().tolist(),
        "each horizon, eager sweep": lambda: separately(eager_mpc_gradients),
        "each horizon, definition": lambda: separately(mpc_gradients),
    }
    answers = [torch.tensor(run()) for run in systems.values()]  # warms up, too
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-5)  # gradients are float32
    times = time_alternating(systems, repeats=repeats)
    first = statistics.median(times["one pass"])
    return [
        Row.of_times(
            taken,
            system=name,
            windows="sliding:1..T",
            split=False,
            stages=1,
            microbatches=1,
            extra={"ratio": statistics.median(taken) / first},
        )
        for name, taken in times.items()
    ]


def time_alternating(systems: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each system, once per round."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def _flatten(gradients: Gradients, model: Chain) -> torch.Tensor:
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.")]
    # In float64, as the profile's inner products: float32 sums over millions of entries lose three digits.
    return torch.cat([gradients[name].flatten() for name in names]).double()
