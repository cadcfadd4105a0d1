"""The straggler report: a rank that is really slowed down is named, one with more to do is not."""

import statistics
from pathlib import Path

import pytest

from mpc_dist.report.run import read_run
from mpc_dist.training import loop
from mpc_dist.training.metrics import read_metrics
from mpc_dist.training.straggler import Pace, find_straggler
from tests.training.faulty import SMALL, Fault, train_faulty
from tests.training.local import parse, train_locally


def test_more_work_is_no_straggler_and_slow_work_is():
    fair = [Pace(0, 1.0, 10.0, {}), Pace(1, 3.1, 30.0, {}), Pace(2, 1.0, 10.0, {})]
    assert find_straggler(fair) is None
    slow = [Pace(0, 1.0, 10.0, {1: 4.0}), Pace(1, 6.0, 30.0, {0: 0.5}), Pace(2, 1.0, 10.0, {1: 5.0})]
    found = find_straggler(slow)
    assert found is not None
    assert (found.rank, found.factor, found.seconds, found.waited) == (1, pytest.approx(2), pytest.approx(3), 9.0)


def test_a_rank_that_is_slow_but_not_the_busiest_holds_nobody_back():
    assert find_straggler([Pace(0, 4.0, 40.0, {}), Pace(1, 3.0, 10.0, {}), Pace(2, 4.0, 40.0, {})]) is None


def test_one_rank_has_none_to_wait_for():
    assert find_straggler([Pace(0, 1.0, 1.0, {})]) is None


def test_the_pace_is_that_of_the_last_steps_and_not_of_the_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(loop, "MOST_STEPS", 2)
    steps: list[list[float]] = []
    median = statistics.median
    monkeypatch.setattr(loop.statistics, "median", lambda values: steps.append(list(values)) or median(values))
    train_locally([*SMALL, "--training.steps", "5"], tmp_path)
    (kept,) = (values for values in steps if values)
    assert len(kept) == 2
    assert read_metrics(tmp_path, 0)[-1]["busy_seconds"] == pytest.approx(sum(kept) / 2)


def test_batches_are_read_ahead_by_the_workers_asked_for(tmp_path: Path, monkeypatch):
    asked: list[int] = []

    class Recorded(loop.Reader):
        def __init__(self, splits, *, num_workers: int) -> None:
            asked.append(num_workers)
            super().__init__(splits, num_workers=num_workers)

    monkeypatch.setattr(loop, "Reader", Recorded)
    train_locally([*SMALL, "--training.steps", "1", "--training.workers", "2"], tmp_path)
    assert asked == [2]


def test_a_slowed_rank_is_named_at_the_end_of_a_run_and_in_its_report(tmp_path: Path):
    """Stages of 1, 1 and 4 blocks; a block of rank 1 takes 60 ms more in each of 3 micro-batches."""
    options = "--parallel.stages 3 --parallel.partition [1,1,4] --horizon 1 --training.steps 8 --checkpoints.every 0"
    config = parse([*SMALL, *options.split(), "--training.folder", str(tmp_path)])
    train_faulty(config, Fault(1, "sleep", seconds=0.06))
    for rank in range(3):
        end = read_metrics(tmp_path, rank)[-1]
        assert end["straggler"]["rank"] == 1
        assert end["straggler"]["seconds"] > 0.15
        assert end["straggler"]["waited"] > 0.2
    assert read_metrics(tmp_path, 2)[-1]["seconds_waiting_for"]["1"] > 0.1
    assert any("rank 1 holds the pipeline back" in note for note in read_run(tmp_path).notes)
