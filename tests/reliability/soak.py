"""`make soak`: random jobs are struck, stopped and started again for a while, and long ones must not grow.

    python -m tests.reliability.soak --minutes 20 --seed 0          as `make soak` does
    python -m tests.reliability.soak --seed 0 --only 17             one job of it again

After each job its losses and weights must equal those of the same job that nothing befell, bit for bit, and nothing of
it may be left on the machine. Exits with 1 if anything was wrong.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from mpc_dist.runtime.preemption import EXIT_PREEMPTED
from mpc_dist.training.config import Config
from mpc_dist.training.metrics import read_metrics
from tests.reliability.agent import Outcome, run_job
from tests.reliability.left_over import Surroundings, surround
from tests.reliability.points import SIGNALS, check, check_equal, choose_strike, run_reference
from tests.reliability.steady import DISTURBED_EVERY, EVERY, MOST_KIB, count_while_training, find_growth, read_samples
from tests.reliability.strike import PHASES, START, Strike
from tests.training.local import parse

COMMON = (
    "--model.name gpt --model.width 16 --model.num_heads 2 --model.dropout 0.1 --data.name text --data.context 16 "
    "--data.max_bytes 40000 --training.log_every 1 --training.eval_batches 1 --device cpu --checkpoints.keep 2"
).split()
LONG = {
    "2 stages": "--parallel.stages 2",
    "2 stages x 2 replicas, shared head, split": "--parallel.stages 2 --data_parallel.degree 2 --parallel.split true "
    "--readout.kind shared",
}
LONG_STEPS = 2000
DEADLINE = 300.0
"""Seconds that one attempt may take on a busy machine."""


def draw(chosen: random.Random) -> list[str]:
    """A job on at most 4 ranks."""
    stages, replicas = chosen.choice([(1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
    blocks = chosen.randint(max(stages, 2), 6)
    cuts = sorted(chosen.sample(range(1, blocks), stages - 1))
    partition = [after - before for before, after in zip([0, *cuts], [*cuts, blocks], strict=True)]
    microbatches = chosen.choice([1, 2, 4])
    given: dict[str, object] = {
        "model.num_blocks": blocks,
        "parallel.stages": stages,
        "parallel.partition": str(partition).replace(" ", ""),
        "parallel.microbatches": microbatches,
        "parallel.split": chosen.choice(["true", "false"]),
        "data_parallel.degree": replicas,
        "batch_size": microbatches * chosen.choice([1, 2, 4]),
        "readout.kind": chosen.choice(["local", "local", "shared"]),
        "optimizer.lr": chosen.choice([0.001, 0.01]),
        "seed": chosen.randrange(1000),
        "training.steps": chosen.randint(6, 14),
        "training.eval_every": chosen.randint(2, 5),
        "training.recompute": chosen.choice(["true", "false", "false"]),
        "training.on_nonfinite": chosen.choice(["stop", "stop", "skip"]),
        "checkpoints.every": chosen.randint(1, 4),
    }
    windows = chosen.choice(["sliding", "tumbling", "cumulative", "backprop", "adaptive"])
    if windows == "adaptive":
        given |= {"horizon.mode": windows, "horizon.every": chosen.randint(1, 3)}
        given |= {"optimizer.lr": 0} if chosen.random() < 0.5 else {}  # then it grows soon
    else:
        unit = chosen.choice(["stages", "blocks"])
        given |= {"horizon.windows": windows, "horizon.unit": unit}
        if windows != "backprop":
            given["horizon.size"] = chosen.randint(1, stages if unit == "stages" else blocks)
    if chosen.random() < 0.3:
        given |= {"training.clip_norm": 0.5, "training.clip_scope": chosen.choice(["stage", "global"])}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def soak_job(chosen: random.Random, folder: Path, surroundings: Surroundings) -> tuple[str, list[str]]:
    """Run a drawn job twice, undisturbed and disturbed; in words what it was, and what befell it."""
    arguments = draw(chosen)
    plain = parse([*COMMON, *arguments, "--training.folder", str(folder / "plain")])
    config = parse([*COMMON, *arguments, "--training.folder", str(folder / "run")])
    try:
        with surroundings.expect_nothing_left():
            reference = run_reference(plain, folder / "reference")
        phases = [one for one in PHASES if any(reference.counts[one, rank] for rank in range(config.num_ranks))]
        with surroundings.expect_nothing_left():
            if chosen.random() < 0.2:
                outcome, befell = ask_to_stop(chosen, config, folder)
                check_equal(outcome, config, reference, befell)
                return " ".join(arguments), befell
            # Nobody would end a rank that is stopped alone.
            signals = [one for one in SIGNALS if one != signal.SIGSTOP or config.num_ranks > 1]
            strikes = [
                choose_strike(chosen, reference, chosen.choice(phases), chosen.choice(signals))
                for _ in range(chosen.choice([1, 1, 2, 3]))
            ]
            # Nor does anybody but a launcher notice one that dies before ranks are connected, within the timeout.
            needs_agent = any(one.signal == signal.SIGSTOP or one.phase == START for one in strikes)
            tells_others = chosen.random() < 0.7 or needs_agent
            outcome = run_job(config, folder / "job", strikes, deadline=DEADLINE, tells_others=tells_others)
        # What is left to do after a first strike may be too little for the others to fall.
        fallen: list[Strike] = strikes[: max(1, len(outcome.attempts) - 1)]
        check(outcome, config, reference, fallen)
    except BaseException:
        sys.stderr.write(f"the job: {' '.join(arguments)}\n")
        raise
    return " ".join(arguments), [f"{one.signal.name} in {one.phase}" for one in fallen]


def ask_to_stop(chosen: random.Random, config: Config, folder: Path) -> tuple[Outcome, list[str]]:
    """Signal one rank after some steps, and start the job again until it has ended."""
    rank, number = chosen.randrange(config.num_ranks), chosen.choice([signal.SIGTERM, signal.SIGUSR1])
    step = chosen.randint(1, config.training.steps // 2)

    def strike(ranks: list[Any]) -> None:
        deadline = time.monotonic() + DEADLINE
        while ranks[rank].is_alive() and time.monotonic() < deadline:
            lines = read_metrics(Path(config.training.folder), rank)
            if sum(line["event"] == "step" for line in lines) >= step:
                os.kill(ranks[rank].pid, number)
                return
            time.sleep(0.01)

    first = run_job(config, folder / "job", deadline=DEADLINE, meanwhile=strike)
    if set(first.attempts[-1].exit_codes) != {EXIT_PREEMPTED}:
        return first, [f"{number.name}, too late"]
    again = run_job(config, folder / "again", deadline=DEADLINE)
    return Outcome([*first.attempts, *again.attempts]), [number.name]


def soak_long(name: str, num_steps: int, folder: Path, surroundings: Surroundings) -> list[str]:
    """Train for long, with a disturbance of every kind now and then; what grew on any rank."""
    arguments = f"--model.num_blocks 4 --batch_size 4 --parallel.microbatches 2 --horizon.mode adaptive {LONG[name]} "
    arguments += f"--horizon.every {DISTURBED_EVERY} --training.eval_every {DISTURBED_EVERY} "
    arguments += f"--checkpoints.every {EVERY} --training.steps {num_steps} --training.folder {folder / 'run'}"
    config = parse([*COMMON, *arguments.split()])
    with surroundings.expect_nothing_left():
        prepare = partial(count_while_training, folder)
        outcome = run_job(config, folder / "job", max_restarts=0, deadline=num_steps / 2, prepare=prepare)
    assert outcome.succeeded, outcome.attempts[-1].errors
    ranks = range(config.num_ranks)
    assert [read_metrics(folder / "run", rank)[-1]["event"] for rank in ranks] == ["end" for _ in ranks]
    # Heaps settle with time: in a short run the same share of growth would be none.
    most_kib = MOST_KIB * max(1.0, LONG_STEPS / num_steps)
    return [
        f"rank {rank}: {what}"
        for rank in ranks
        for what in find_growth(read_samples(folder, rank), warm_up=num_steps // 4, most_kib=most_kib)
    ]


class Soak:
    """What was done so far."""

    def __init__(self, minutes: float) -> None:
        self.started = time.monotonic()
        self.minutes = minutes
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def run(self, name: str, work: Callable[[Path], str], folder: Path) -> None:
        """Do a part and tell how it went; what a failure left to look at is kept."""
        start = self.seconds
        try:
            folder.mkdir()
            told = work(folder)
            shutil.rmtree(folder)
        except Exception:
            self.failures.append(name)
            told = f"FAILED, see {folder}\n{traceback.format_exc()}"
        say(f"[{self.seconds / 60:5.1f} of {self.minutes:g} min] {name}: {told} ({self.seconds - start:.0f} s)")

    def tell(self) -> str:
        counts = ", ".join(f"{count} x {what}" for what, count in sorted(self.counts.items()))
        verdict = f"{len(self.failures)} FAILED: {'; '.join(self.failures)}" if self.failures else "nothing was wrong"
        return f"soak of {self.seconds / 60:.1f} min: {counts}: {verdict}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="no job begins after that (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="what jobs and strikes are drawn from (default: 0)")
    parser.add_argument("--steps", type=int, default=LONG_STEPS, help="of each long job (default: 2000)")
    parser.add_argument("--long", type=int, default=len(LONG), help=f"how many long jobs (default: {len(LONG)})")
    parser.add_argument("--jobs", type=int, default=100_000, help="at most so many random jobs (default: no limit)")
    parser.add_argument("--only", type=int, help="run the random job of this number only")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(options.minutes)
    numbers = range(options.jobs) if options.only is None else [options.only]

    with surround(folder) as surroundings:

        def long(name: str, part: Path) -> str:
            grown = soak_long(name, options.steps, part, surroundings)
            assert not grown, "\n".join(["it grew:", *grown])
            soak.counts[f"{options.steps} steps"] += 1
            return "flat"

        def job(number: int, part: Path) -> str:
            arguments, befell = soak_job(random.Random(f"{options.seed} {number}"), part, surroundings)
            soak.counts["job"] += 1
            soak.counts.update(befell)
            return f"{', '.join(befell)}: equal; {arguments}"

        for name in islice(LONG, options.long if options.only is None else 0):
            soak.run(f"{options.steps} steps on {name}", partial(long, name), folder / f"long {name}".replace(" ", "-"))
        for number in numbers:
            if soak.seconds > 60 * options.minutes:
                break
            soak.run(f"job {number}", partial(job, number), folder / f"job{number}")
    say(soak.tell())
    if not soak.failures:
        # When the server has ended, whose socket is in there.
        Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
