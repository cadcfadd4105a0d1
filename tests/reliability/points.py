"""Random places at which ranks are struck, and what must hold after each."""

import ast
import random
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.config import Config
from mpc_dist.training.metrics import read_metrics
from tests.reliability.agent import STOP_TIMEOUT, Outcome, run_job
from tests.reliability.strike import Strike
from tests.training.local import parse

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
STEPS = 8
COMMON = (
    "--model.name gpt --model.num_blocks 4 --model.width 16 --model.num_heads 2 --model.dropout 0.1 --data.name text "
    "--data.context 16 --data.max_bytes 40000 --batch_size 8 --parallel.microbatches 2 --training.log_every 1 "
    "--training.eval_every 3 --training.eval_batches 1 --device cpu --checkpoints.every 2 --checkpoints.keep 2 "
    f"--training.steps {STEPS}"
).split()
JOBS = {
    "horizon 1 on 2 stages": "--parallel.stages 2 --horizon 1",
    "back-propagation on 3 stages, split": "--parallel.stages 3 --parallel.split true --horizon.windows backprop",
    "2 stages x 2 replicas, shared head": "--parallel.stages 2 --data_parallel.degree 2 --horizon 1 "
    "--readout.kind shared",
    "a growing horizon on 2 stages": "--parallel.stages 2 --horizon.mode adaptive --horizon.every 2 --optimizer.lr 0",
}
GROWING = "a growing horizon on 2 stages"


@dataclass(frozen=True)
class Reference:
    """A job that nothing befell."""

    losses: Mapping[tuple[int, str], float]
    weights: Mapping[str, torch.Tensor]
    counts: Mapping[tuple[str, int], int]
    """Calls by phase and rank."""
    files: frozenset[str]
    """What is in its run folder at the end."""


def build(job: str, folder: Path, *more: str) -> Config:
    return parse([*COMMON, *JOBS[job].split(), "--training.folder", str(folder), *more])


def read_losses(folder: Path, num_ranks: int) -> list[tuple[tuple[int, str], float]]:
    """Every loss that was ever written, also those of a step that was done again."""
    lines = [(rank, line) for rank in range(num_ranks) for line in read_metrics(folder, rank)]
    return [
        ((line["step"], f"{rank}/{boundary}"), loss)
        for rank, line in lines
        if line["event"] == "step"
        for boundary, loss in line["losses"].items()
    ]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = SavedCheckpoint(list_checkpoints(folder_of(folder))[-1])
    return saved.read_all(list(saved.described))


def make_reference(job: str, folder: Path) -> Reference:
    return run_reference(build(job, folder / "run"), folder)


def run_reference(config: Config, folder: Path) -> Reference:
    """What a job comes to that nothing befalls; `folder` is for what the agent writes down."""
    outcome = run_job(config, folder, counts=True)
    assert outcome.succeeded, outcome.attempts[-1].errors
    counts = {}
    for rank in range(config.num_ranks):
        found = ast.literal_eval((folder / f"counts-0-{rank}").read_text())
        counts |= {(phase, rank): count for phase, count in found.items()}
    run = Path(config.training.folder)
    return Reference(dict(read_losses(run, config.num_ranks)), read_weights(run), counts, list_files(run))


def choose_strike(random: random.Random, reference: Reference, phase: str, how: signal.Signals) -> Strike:
    ranks = [rank for (one, rank), count in reference.counts.items() if one == phase and count]
    rank = random.choice(ranks)
    # A phase's calls differ by a few from run to run (waiting in a loop): not its very last ones.
    most = max(1, int(0.9 * reference.counts[phase, rank]))
    return Strike(phase, rank, random.randint(1, most), how)


def list_files(run: Path) -> frozenset[str]:
    """What a run has written, but for what it tells of stalls."""
    found = {str(path.relative_to(run)) for path in run.rglob("*")}
    return frozenset(name for name in found if name.split("/")[0] != "stall")


def is_left_behind(name: str, folder: Path, num_ranks: int) -> bool:
    """Whether this is a weight of a readout that a run does not use any more."""
    readout = re.search(r"\breadouts\.(\d+)\.", name)
    ends = [line for rank in range(num_ranks) for line in read_metrics(folder, rank) if line["event"] == "end"]
    return readout is not None and readout[1] not in {boundary for end in ends for boundary in end["scores"]}


def check_equal(outcome: Outcome, config: Config, reference: Reference, what: object) -> None:
    """The job has ended, it is the undisturbed one, and its folder holds what that one's does."""
    folder = Path(config.training.folder)
    said = "\n".join(text for attempt in outcome.attempts for text in attempt.errors)
    assert outcome.succeeded, said
    written = read_losses(folder, config.num_ranks)
    for key, loss in written:
        assert loss == reference.losses[key], (key, what)
    assert dict(written).keys() == reference.losses.keys()
    weights = read_weights(folder)
    # A horizon that has grown leaves readouts behind, for good: one that comes back does not have them any more.
    left_behind = {name for name in reference.weights if is_left_behind(name, folder, config.num_ranks)}
    assert reference.weights.keys() - left_behind <= weights.keys() <= reference.weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(reference.weights[name], tensor), name
    # A checkpoint that is under way ends in .partial, and a lock in the folder would be one that nobody holds.
    assert list_files(folder) == reference.files, list_files(folder) ^ reference.files


def is_blamed(rank: int, text: str) -> bool:
    """Whether a silent rank is named: in start-up the silence is told, later what every rank was doing."""
    return f"no sign of life of rank {rank}" in text or f"culprit: rank {rank}: wrote nothing" in text


def check(outcome: Outcome, config: Config, reference: Reference, strikes: list[Strike]) -> None:
    """The job has come back by itself, has lost nothing since its last checkpoint, and is the undisturbed one."""
    folder = Path(config.training.folder)
    check_equal(outcome, config, reference, strikes)
    assert len(outcome.attempts) > len(strikes), f"no strike fell: {strikes}"
    # The last attempt went on from the newest checkpoint that there was.
    newest = outcome.attempts[-2].last_checkpoint
    for rank in range(config.num_ranks):
        lines = read_metrics(folder, rank)
        last = max(index for index, line in enumerate(lines) if line["event"] == "start")
        assert [line["step"] for line in lines[last:] if line["event"] == "resume"] == ([newest] if newest else [])
    for strike, attempt in zip(strikes, outcome.attempts, strict=False):
        if strike.signal == signal.SIGSTOP:
            others = [text for rank, text in enumerate(attempt.errors) if rank != strike.rank]
            assert any(is_blamed(strike.rank, text) for text in others), (strike, others)
            assert attempt.seconds_to_notice is not None
            assert attempt.seconds_to_notice < STOP_TIMEOUT + 5, (strike, attempt.seconds_to_notice)
