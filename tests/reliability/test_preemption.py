"""A job that is asked to stop by a signal: all ranks do after the same step, saved, in bounded time."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from mpc_dist.runtime import preemption
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.preemption import ANSWER_SECONDS, EXIT_FAILED, EXIT_PREEMPTED, FAILURE_SECONDS, Preemption
from mpc_dist.runtime.watch import PeerError
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.config import Config
from mpc_dist.training.metrics import read_metrics
from tests.reliability.agent import run_job
from tests.reliability.points import GROWING, JOBS, build, read_losses

ONE = "one process"
ENDLESS = ("--training.steps", "100000", "--training.eval_every", "100000", "--checkpoints.every", "100000")


def send(config: Config, signals: dict[int, signal.Signals]) -> Callable[[list[Any]], None]:
    """Send each of these ranks its signal, once all ranks have done a few steps."""

    def has_begun(rank: int) -> bool:
        steps = [line for line in read_metrics(Path(config.training.folder), rank) if line["event"] == "step"]
        return len(steps) >= 3

    def strike(ranks: list[Any]) -> None:
        deadline = time.monotonic() + 100
        while not all(map(has_begun, range(len(ranks)))) and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank, number in signals.items():
            os.kill(ranks[rank].pid, number)

    return strike


@pytest.mark.parametrize(
    ("job", "rank", "number"),
    [
        pytest.param(ONE, 0, signal.SIGTERM, marks=pytest.mark.slow),
        ("back-propagation on 3 stages, split", 1, signal.SIGUSR1),
        pytest.param("horizon 1 on 2 stages", 1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("2 stages x 2 replicas, shared head", 3, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(GROWING, 0, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_signalled_and_all_stop_after_the_same_step(job, rank, number, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(JOBS, ONE, "")
    config = build(job, tmp_path / "run", *ENDLESS)
    outcome = run_job(config, tmp_path / "job", meanwhile=send(config, {rank: number}))
    (attempt,) = outcome.attempts  # nobody starts it again
    assert set(attempt.exit_codes) == {EXIT_PREEMPTED}, attempt.errors
    last = attempt.last_checkpoint
    for one in range(config.num_ranks):
        lines = read_metrics(tmp_path / "run", one)
        assert [line["step"] for line in lines if line["event"] == "preempted"] == [last]
        assert max(line["step"] for line in lines if line["event"] == "step") == last
    # Gone on from there, it is the run that was never asked.
    more = (*ENDLESS[2:], "--training.steps", str(last + 3))
    for name in ("run", "whole"):
        assert run_job(build(job, tmp_path / name, *more), tmp_path / f"again {name}").succeeded
    stopped, whole = (read_losses(tmp_path / name, config.num_ranks) for name in ("run", "whole"))
    assert len(stopped) == len(whole)
    assert dict(stopped) == dict(whole)


@pytest.mark.slow
def test_without_checkpoints_all_stop_alike_and_keep_nothing(tmp_path: Path):
    config = build("horizon 1 on 2 stages", tmp_path / "run", *ENDLESS, "--checkpoints.every", "0")
    (attempt,) = run_job(config, tmp_path / "job", meanwhile=send(config, {1: signal.SIGTERM})).attempts
    assert set(attempt.exit_codes) == {EXIT_PREEMPTED}, attempt.errors
    assert all("not saved, as configured" in said for said in attempt.errors), attempt.errors
    assert not folder_of(tmp_path / "run").exists()


@pytest.mark.slow
def test_if_a_rank_does_not_answer_the_others_end_in_time_and_say_which(tmp_path: Path):
    config = build("horizon 1 on 2 stages", tmp_path / "run", *ENDLESS, "--checkpoints.every", "1")
    times: list[float] = []

    def strike(ranks: list[Any]) -> None:
        send(config, {1: signal.SIGSTOP, 0: signal.SIGTERM})(ranks)
        times.append(time.monotonic())
        ranks[0].join(ANSWER_SECONDS + FAILURE_SECONDS + 30)
        times.append(time.monotonic())

    outcome = run_job(config, tmp_path / "job", meanwhile=strike, max_restarts=0)
    (attempt,) = outcome.attempts
    assert attempt.exit_codes[0] == EXIT_FAILED
    assert "rank 0 was asked to stop, but rank 1 did not answer within 10 s" in attempt.errors[0]
    assert times[1] - times[0] < ANSWER_SECONDS + FAILURE_SECONDS + 5  # a busy machine
    kept = list_checkpoints(folder_of(tmp_path / "run"))
    assert kept
    assert step_of(kept[-1]) == attempt.last_checkpoint


@pytest.mark.parametrize(
    ("launch", "signalled"),
    [(Launch(restarts_left=1), True), (Launch(), False), (Launch(1, 2, 1, restarts_left=1), False)],
)
def test_a_launcher_that_would_start_the_job_again_is_told_to_end_by_one_rank_of_its_host(
    launch, signalled, monkeypatch
):
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(preemption.os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(preemption, "LAUNCHER_SECONDS", 0.01)
    Preemption(launch, after=4, grace=30, store=HashStore()).leave()
    assert sent == ([(os.getppid(), signal.SIGTERM)] if signalled else [])


def test_a_step_that_was_promised_is_begun_without_waiting():
    asked = Preemption(Launch(), after=4, grace=0.1)
    asked._promise = 5
    assert asked.begin(5)
    with pytest.raises(PeerError, match="got no answer"):
        asked.begin(6)
    asked._stop = 6
    assert asked.begin(6)
    assert not asked.begin(7)


def test_a_rank_that_rank_0_does_not_answer_says_so(monkeypatch):
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.2)
    store = HashStore()
    with Preemption(Launch(1, 2, 1), after=4, grace=30, store=store) as asked:
        PrefixStore("mpc_dist/preemption", store).set("asked", "1")
        asked._decided.wait(20)
        with pytest.raises(PeerError, match="rank 1 was asked to stop, but rank 0 did not answer within 0 s"):
            asked.begin(5)


def stop_but_hang(grace: float, is_saved: bool) -> None:
    with Preemption(Launch(), after=4, grace=grace) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        step = 5
        while preemption.begin(step):
            step += 1
        if is_saved:
            preemption.leave()
        time.sleep(60)


@pytest.mark.parametrize(("is_saved", "code"), [(False, EXIT_FAILED), (True, EXIT_PREEMPTED)])
def test_what_does_not_end_within_the_grace_is_ended(is_saved, code):
    process = multiprocessing.get_context("forkserver").Process(target=stop_but_hang, args=(1.0, is_saved))
    process.start()
    process.join(50)
    assert process.exitcode == code


def test_without_a_signal_nothing_is_left_behind():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with Preemption(Launch(), after=0, grace=1.0) as preemption:
        assert all(preemption.begin(step) for step in range(1, 100))
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1
