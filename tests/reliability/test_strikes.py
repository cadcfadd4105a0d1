"""Ranks are killed and stopped at random places, and the job comes back as if nothing had been."""

import random
import signal
import sys
from pathlib import Path

import pytest

from tests.reliability.agent import run_job
from tests.reliability.points import GROWING, JOBS, Reference, build, check, choose_strike, make_reference
from tests.reliability.strike import ACTIONS, EVALUATION, HORIZON, PHASES, SAVE, START, Strike

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
NUM_POINTS = 208
POINTS_PER_TEST = 8
"""Small enough for a test's time limit on a busy machine."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Jobs that nothing befell, made when they are first needed."""

    class Made(dict[str, Reference]):
        def __missing__(self, job: str) -> Reference:
            self[job] = make_reference(job, tmp_path_factory.mktemp("reference"))
            return self[job]

    return Made()


def phases_of(job: str) -> list[str]:
    return [phase for phase in PHASES if phase != HORIZON or job == GROWING]


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        (START, signal.SIGKILL),
        (ACTIONS, signal.SIGSEGV),
        (SAVE, signal.SIGKILL),
        (EVALUATION, signal.SIGSTOP),
        (HORIZON, signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_a_struck_job_comes_back_as_the_undisturbed_one(phase, how, references, tmp_path: Path):
    strike = choose_strike(random.Random(f"{phase} {how}"), references[GROWING], phase, how)
    config = build(GROWING, tmp_path / "run")
    check(run_job(config, tmp_path / "job", [strike]), config, references[GROWING], [strike])


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(NUM_POINTS // POINTS_PER_TEST))
def test_a_job_struck_at_random_comes_back_as_the_undisturbed_one(seed, references, tmp_path: Path):
    """Every fourth job is struck again when it has just come back."""
    chosen = random.Random(seed)
    for point in range(POINTS_PER_TEST):
        # A growing horizon is half of them: it has one phase more.
        job = GROWING if point % 2 else chosen.choice([name for name in JOBS if name != GROWING])
        number = seed * POINTS_PER_TEST + point
        strikes = [
            choose_strike(chosen, references[job], phases[(number + again) % len(phases)], chosen.choice(SIGNALS))
            for phases in [phases_of(job)]
            for again in range(2 if number % 4 == 0 else 1)
        ]
        config = build(job, tmp_path / f"run{point}")
        outcome = run_job(config, tmp_path / f"job{point}", strikes, deadline=300)
        # What is left to do after a first strike may be too little for the second to fall.
        check(outcome, config, references[job], strikes[: max(1, len(outcome.attempts) - 1)])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waited_in_vain_for_a_save_is_not_to_blame(rank, references, tmp_path: Path):
    """Whichever of the two is stopped, the other one names it."""
    job = "horizon 1 on 2 stages"
    strike = Strike(SAVE, rank, references[job].counts[SAVE, rank] // 2, signal.SIGSTOP)
    config = build(job, tmp_path / "run")
    check(run_job(config, tmp_path / "job", [strike]), config, references[job], [strike])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("job", JOBS)
def test_a_dead_rank_is_noticed_by_all_others_within_ten_seconds(job, which, references, tmp_path: Path, capsys):
    """By themselves, with the default timeout of ten minutes: a launcher on another host tells them nothing."""
    config = build(job, tmp_path / "run", "--training.steps", "1000")
    rank = 0 if which == "first" else config.num_ranks - 1
    strike = Strike(ACTIONS, rank, references[job].counts[ACTIONS, rank] // 2, signal.SIGKILL)
    (attempt,) = run_job(config, tmp_path / "job", [strike], max_restarts=0, tells_others=False).attempts
    assert attempt.exit_codes[rank] == -signal.SIGKILL
    assert all(code != 0 for code in attempt.exit_codes)
    assert attempt.seconds_to_end is not None
    with capsys.disabled():
        sys.stdout.write(f"\n{job}, {which} rank: noticed by all after {attempt.seconds_to_end:.1f} s\n")
    assert attempt.seconds_to_end < 10
