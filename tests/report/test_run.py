"""Run folders read back: finished, running, crashed and resumed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpc_dist.report.page import build_page
from mpc_dist.report.replay import Row, draw_close, replay
from mpc_dist.report.run import Run, name_runs, read_run
from mpc_dist.schedule import build_schedule, lay_out
from mpc_dist.schedule.action import COMPUTE, Op
from mpc_dist.training.metrics import metrics_path, read_metrics
from mpc_dist.windows import backprop, expand, tumbling
from tests.report.conftest import RUNS

Copy = Callable[[str], Path]


def of_event(folder: Path, rank: int, event: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder, rank) if line["event"] == event]


def write_lines(folder: Path, rank: int, lines: list[dict[str, Any]]) -> None:
    metrics_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut_at_step(folder: Path, step: int) -> None:
    """What a crash after that step leaves."""
    for path in folder.glob("metrics-rank*.jsonl"):
        rank = int(path.stem.removeprefix("metrics-rank"))
        write_lines(folder, rank, [line for line in read_metrics(folder, rank) if line.get("step", 0) <= step])


def told(run: Run) -> tuple[str, ...]:
    """The notes, but for a rank that was slow: on a busy machine any may be."""
    return tuple(note for note in run.notes if "holds the pipeline back" not in note)


def test_a_finished_run_reads_back_as_it_was_written(run_folders: dict[str, Path]):
    folder = run_folders["horizon1"]
    run = read_run(folder)
    assert run.status == "finished"
    assert (run.num_stages, run.num_replicas, run.partition, run.last_step) == (2, 1, (2, 2), 24)
    assert run.windows == expand(tumbling(2, 1), (2, 2))
    steps, evaluations = of_event(folder, 1, "step"), of_event(folder, 1, "evaluation")
    assert [(point.step, point.value) for point in run.train_losses] == [
        (one["step"], one["losses"]["4"]) for one in steps
    ]
    assert [(point.step, point.value) for point in run.test_losses] == [
        (one["step"], one["scores"]["4"]["loss"]) for one in evaluations
    ]
    started = read_metrics(folder, 1)[0]["time"]
    assert run.train_losses[-1].elapsed == pytest.approx(steps[-1]["time"] - started)
    assert [rank.live_bytes for rank in run.ranks] == [of_event(folder, r, "step")[0]["live_bytes"] for r in (0, 1)]
    last = run.last_evaluation
    assert last is not None
    assert last.step == 24
    found = {2: of_event(folder, 0, "evaluation")[-1], 4: evaluations[-1]}
    assert {s: (one.loss, one.accuracy) for s, one in last.exits.items()} == {
        s: tuple(line["scores"][str(s)].values()) for s, line in found.items()
    }


def test_losses_of_replicas_are_averaged_and_a_regression_has_no_accuracy(run_folders: dict[str, Path]):
    folder = run_folders["regression"]
    run = read_run(folder)
    parts = [of_event(folder, rank, "step") for rank in (2, 3)]
    expected = [(a["losses"]["6"] + b["losses"]["6"]) / 2 for a, b in zip(*parts, strict=True)]
    assert [point.value for point in run.train_losses] == pytest.approx(expected)
    assert [(one.stage, one.replica) for one in run.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert run.last_evaluation is not None
    assert {score.accuracy for score in run.last_evaluation.exits.values()} == {None}


def test_an_adaptive_run_ends_with_the_windows_that_it_grew(run_folders: dict[str, Path]):
    run = read_run(run_folders["adaptive"])
    decisions = of_event(run_folders["adaptive"], 0, "horizon")
    assert [(made.step, made.size, made.cosine) for made in run.adaptations] == [
        (line["step"], line["size"], line["cosine"]) for line in decisions
    ]
    assert run.first_windows == expand(tumbling(2, 1), (2, 2))
    assert run.windows == expand(tumbling(2, decisions[-1]["size"]), (2, 2))


def test_a_crashed_run_is_interrupted_and_a_silent_one_only_after_a_while(copy_of: Copy):
    folder = copy_of("horizon1")
    cut_at_step(folder, 15)
    newest = max(read_metrics(folder, rank)[-1]["time"] for rank in (0, 1))
    assert read_run(folder, now=newest + 10).status == "running"
    assert read_run(folder, now=newest + 3600).status == "interrupted"
    run = read_run(folder, now=newest + 3600)
    assert run.last_step == 15
    assert run.last_evaluation is not None
    assert run.last_evaluation.step == 10


def test_an_evaluation_counts_once_every_rank_has_finished_it(copy_of: Copy):
    folder = copy_of("horizon1")
    lines = [line for line in read_metrics(folder, 1) if line.get("step", 0) <= 20]
    write_lines(folder, 1, [line for line in lines if (line["event"], line.get("step")) != ("evaluation", 20)])
    last = read_run(folder).last_evaluation
    assert last is not None
    assert last.step == 10


def test_a_line_being_written_or_cut_by_a_crash_is_ignored(copy_of: Copy):
    folder = copy_of("horizon1")
    whole = read_run(folder)
    path = metrics_path(folder, 1)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:5], lines[5][:30] + lines[0], *lines[5:]]) + '{"event": "step", "st')
    assert read_run(folder) == whole


def test_what_a_resumed_run_wrote_later_counts_and_its_pause_does_not(copy_of: Copy):
    folder = copy_of("horizon1")
    whole = read_run(folder)
    pause = 1000.0
    for rank in (0, 1):
        lines = read_metrics(folder, rank)
        later = [{**line, "time": line["time"] + pause} for line in lines if line.get("step", 0) > 10]
        for line in later:
            line["losses"] = {s: loss + 1 for s, loss in line["losses"].items()} if "losses" in line else {}
        first = [line for line in lines if line.get("step", 0) <= 15]  # it crashed after step 15
        resumed = {"event": "resume", "step": 10, "time": first[-1]["time"] + pause}
        write_lines(folder, rank, [*first, resumed, *(line for line in later if line["step"] <= 13)])
    run = read_run(folder, now=0.0)
    before = {point.step: point.value for point in whole.train_losses}
    assert {point.step: point.value for point in run.train_losses} == pytest.approx(
        {step: loss + (step > 10) for step, loss in before.items() if step <= 13}
    )
    assert run.elapsed < pause
    assert told(run) == ("resumed from step 10",)


def test_a_rank_that_wrote_nothing_is_named_and_files_of_an_earlier_larger_run_are_ignored(copy_of: Copy):
    folder = copy_of("horizon1")
    shutil.copy(metrics_path(folder, 0), metrics_path(folder, 7))
    assert read_run(folder).num_ranks == len(read_run(folder).ranks) == 2
    metrics_path(folder, 1).write_text("")
    run = read_run(folder, now=1e12)
    assert run.status == "interrupted"
    assert told(run) == ("nothing was written by rank 1",)
    assert run.train_losses == ()
    with pytest.raises(ValueError, match="no timeline that all ranks finished"):
        replay(run)


def test_a_damaged_plan_is_said_and_no_error(copy_of: Copy):
    folder = copy_of("planned")
    assert read_run(folder).plan is not None
    (folder / "plan.yaml").write_text("chosen: 3")
    run = read_run(folder)
    assert run.plan is None
    assert "is no plan of mpc_dist" in told(run)[0]
    assert "its plan.yaml cannot be read" in build_page([run])


@pytest.mark.parametrize("content", [None, "", '{"event": "sta', "\x00\xff\n"])
def test_a_folder_that_is_no_run_is_refused_with_the_remedy(content: str | None, tmp_path: Path):
    if content is not None:
        metrics_path(tmp_path, 0).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"is no run folder: .*; give a folder that launch/train.py wrote"):
        read_run(tmp_path)


def test_metrics_of_something_else_are_refused(tmp_path: Path):
    metrics_path(tmp_path, 0).write_text('{"event": "start", "loss": 3}\n')
    with pytest.raises(ValueError, match=r"are not of this version of mpc_dist .*num_stages"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("event", "key", "value", "said"),
    [
        ("step", "live_bytes", [], r"live_bytes must be a whole number, got \[\]"),
        ("step", "losses", {"4": "x"}, "losses.4 must be a number, got 'x'"),
        ("evaluation", "scores", {"4": {"loss": None, "accuracy": 1}}, "scores.4.loss must be a number, got None"),
        ("start", "stage", "first", "stage must be a whole number, got 'first'"),
        ("timeline", "actions", [["F0.0", "then", 1]], "must be a number, got 'then'"),
        ("end", "time", None, "time must be a number, got None"),
    ],
)
def test_metrics_of_a_wrong_type_are_refused(event: str, key: str, value: object, said: str, copy_of: Copy):
    folder = copy_of("backprop")
    lines = read_metrics(folder, 0)
    next(line for line in lines if line["event"] == event)[key] = value
    write_lines(folder, 0, lines)
    with pytest.raises(ValueError, match=rf"are not of this version of mpc_dist .*{said}"):
        read_run(folder)


@pytest.mark.parametrize("name", RUNS)
def test_the_simulated_step_has_the_actions_that_ran_in_their_order(name: str, run_folders: dict[str, Path]):
    """What is drawn beside the measured step is the very schedule that ran."""
    found = replay(read_run(run_folders[name]))
    assert len(found.measured) == len(found.simulated)
    for measured, simulated in zip(found.measured, found.simulated, strict=True):
        assert [one.action for one in measured.intervals] == [one.action for one in simulated.intervals]
        for row in (measured, simulated):
            assert row.start <= row.intervals[0].start
            assert row.end == row.intervals[-1].end
            idle = sum(end - start for start, end in row.gaps)
            assert row.idle_share == pytest.approx(idle / (row.end - row.start), abs=1e-6)
    for rows in (found.measured, found.simulated):
        assert min(row.start for row in rows) == 0


def test_ranks_of_two_machines_are_drawn_on_one_clock(copy_of: Copy):
    folder = copy_of("backprop")
    here = replay(read_run(folder))
    lines = read_metrics(folder, 1)
    for line in lines:
        if line["event"] == "timeline":
            line["actions"] = [(text, start + 5e5, end + 5e5) for text, start, end in line["actions"]]
    write_lines(folder, 1, lines)
    apart = replay(read_run(folder))
    # The lines are written within milliseconds of the actions that they tell of.
    assert apart.step == here.step
    assert [row.start for row in apart.measured] == pytest.approx([row.start for row in here.measured], abs=0.1)


def test_a_straggler_stands_out(copy_of: Copy):
    folder = copy_of("horizon1")
    lines = read_metrics(folder, 1)
    for line in lines:
        if line["event"] == "timeline":
            origin = line["actions"][0][1]
            line["actions"] = [(a, origin + 9 * (s - origin), origin + 9 * (e - origin)) for a, s, e in line["actions"]]
    write_lines(folder, 1, lines)
    assert replay(read_run(folder)).straggler == 1


def test_ranks_that_ran_far_ahead_are_drawn_at_most_a_step_apart():
    rows = [Row(0, 0.0, 2.0, ()), Row(1, 50.0, 53.0, ()), Row(2, 51.0, 54.0, ()), Row(3, 60.0, 61.0, ())]
    close, moved = draw_close(rows)
    assert [(row.start, row.end) for row in close] == [(0, 2), (2, 5), (3, 6), (6, 7)]
    assert moved == 54
    assert draw_close(close) == (close, 0)


def test_the_order_that_ran_follows_from_windows_and_partition():
    """The claim above can fail: back-propagation's order is not that of horizon 1."""
    orders = []
    for windows in (backprop(4), expand(tumbling(2, 1), (2, 2))):
        schedule = build_schedule(lay_out(windows, (2, 2)), 4)
        orders.append([a for a in schedule.programs[0] if a.op in COMPUTE or a.op is Op.UPDATE])
    assert orders[0] != orders[1]


def test_runs_are_named_by_what_tells_them_apart():
    assert name_runs([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert name_runs([Path("/a/first/x"), Path("/a/second/x"), Path("/a/z")]) == ["first/x", "second/x", "z"]
    assert name_runs([Path("/a/x")]) == ["x"]
