"""Benchmarks: each is a ratio against a peer in the same run, repeats alternating, medians reported.

python launch/bench.py angles --blocks 16 --repeats 7 --json angles.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mpc_dist.gradient import Gradients, eager_mpc_gradients, mpc_gradients
from mpc_dist.models import GPT, Chain, build_chain
from mpc_dist.profile import measure_angles
from mpc_dist.task import Task
from mpc_dist.windows import sliding


@dataclass(frozen=True)
class Row:
    """One system's time in one benchmark."""

    system: str
    seconds: float
    """Median over the repeats."""
    spread: float
    """Largest minus smallest, in seconds."""
    repeats: int
    ratio: float
    """Its median over that of the first system."""


def time_alternating(systems: Mapping[str, Callable[[], object]], *, repeats: int) -> list[Row]:
    """Time each system once per round, after one warm-up round; the first is the one that others are compared with."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for round_number in track(range(repeats + 1), description="rounds", transient=True):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            if round_number:
                times[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(times.values())))
    return [
        Row(name, statistics.median(taken), max(taken) - min(taken), repeats, statistics.median(taken) / first)
        for name, taken in times.items()
    ]


def bench_angles(options: argparse.Namespace) -> list[Row]:
    """The angle of every horizon of a gpt: one pass for all, against each horizon separately."""
    task = Task("tokens", (options.context,), 256)
    model = build_chain(GPT(num_blocks=options.blocks, width=options.width), task, readout="shared")
    generator = torch.Generator().manual_seed(0)
    shape = (2, options.batch_size, options.context)
    inputs, labels = torch.randint(0, 256, shape, generator=generator)

    def separately(compute: Callable[..., Gradients]) -> list[float]:
        exact = _flatten(compute(model, inputs, labels, sliding(model.num_blocks, model.num_blocks)), model)
        cosines = []
        for horizon in range(1, model.num_blocks):
            ours = _flatten(compute(model, inputs, labels, sliding(model.num_blocks, horizon)), model)
            cosines.append(float(torch.nn.functional.cosine_similarity(ours, exact, dim=0)))
        return [*cosines, 1.0]

    systems: dict[str, Callable[[], list[float]]] = {
        "one pass": lambda: measure_angles(model, [(inputs, labels)]).horizon_cosines().tolist(),
        "each horizon, eager sweep": lambda: separately(eager_mpc_gradients),
        "each horizon, definition": lambda: separately(mpc_gradients),
    }
    answers = [torch.tensor(run()) for run in systems.values()]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-5)  # gradients are float32
    return time_alternating(systems, repeats=options.repeats)


def _flatten(gradients: Gradients, model: Chain) -> torch.Tensor:
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.")]
    # In float64, as the profile's inner products: float32 sums over millions of entries lose three digits.
    return torch.cat([gradients[name].flatten() for name in names]).double()


def main() -> None:
    """Run the chosen benchmark, print its table and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    angles = benchmarks.add_parser(
        "angles", help=bench_angles.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    angles.add_argument("--blocks", type=int, default=16, help="blocks of the gpt")
    angles.add_argument("--width", type=int, default=128, help="features of a state")
    angles.add_argument("--context", type=int, default=128, help="tokens per sample")
    angles.add_argument("--batch-size", type=int, default=8, help="samples")
    angles.add_argument("--repeats", type=int, default=7, help="timed rounds after one warm-up round")
    angles.add_argument("--threads", type=int, default=1, help="threads of torch")
    angles.add_argument("--json", type=Path, help="file for the rows")
    angles.set_defaults(run=bench_angles)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    rows = options.run(options)
    table = Table(title=" ".join((options.run.__doc__ or "").split()))
    for heading in ("system", "median s", "spread s", "ratio"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for row in rows:
        table.add_row(row.system, f"{row.seconds:.3f}", f"{row.spread:.3f}", f"{row.ratio:.2f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
