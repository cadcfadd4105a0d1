"""Ranks that are stuck: every wait ends, every rank that can says what it did, and one summary names the culprit."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.runtime.mesh import Launch, Mesh, build_mesh, join
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.runtime.stage import StageOptions
from mpc_dist.runtime.watch import PeerError, Wait
from mpc_dist.schedule import lay_out
from mpc_dist.training import watcher
from mpc_dist.training.incident import IncidentFolder, RankReport, find_culprits, summarise
from mpc_dist.windows import backprop
from tests.examples import build_dense_chain
from tests.training.faulty import SMALL, Fault, inject, train_faulty
from tests.training.local import parse

TIMEOUT = 20
"""Of whole runs: what starting may take on a busy machine."""
FOUR = "--parallel.stages 4 --model.num_blocks 8 --training.steps 5 --checkpoints.every 0".split()


def waiting(rank: int, *peers: int, at: str = "x", lost: bool = False) -> RankReport:
    return RankReport(rank, "training", peers, at, 5.0, is_lost=lost, state={"step": 3})


def test_the_culprit_is_the_rank_at_the_end_of_the_chain_of_waiting():
    silent = {rank: waiting(rank, rank + 1, at=f"receiving from rank {rank + 1}") for rank in range(3)}
    (found,) = find_culprits(silent, 4)
    assert (found.rank, found.num_waiting) == (3, 3)
    assert "wrote nothing" in found.reason
    busy = {**silent, 3: RankReport(3, "training", seconds=9.0, state={"step": 3, "action": "F3.1"})}
    (found,) = find_culprits(busy, 4)
    assert (found.rank, found.num_waiting) == (3, 3)
    assert found.reason == "step 3, training: waits for nobody; at F3.1 for 9.0 s"


def test_of_a_collective_operation_the_member_that_has_not_come_is_to_blame():
    """Ranks 0, 1 and 3 are at the same operation; rank 2 waits for rank 5, which does something else."""
    others = {rank: waiting(rank, *{0, 1, 2, 3} - {rank}, at="the norm") for rank in (0, 1, 3)}
    busy = RankReport(5, "evaluation", state={})
    (found,) = find_culprits({**others, 2: waiting(2, 5), 4: waiting(4, 5), 5: busy}, 6)
    assert (found.rank, found.num_waiting) == (5, 5)


def test_a_circle_and_an_error_are_told_as_such():
    circle = {0: waiting(0, 1, at="a"), 1: waiting(1, 0, at="b")}
    assert summarise(circle, 2, asked_by="rank 0").startswith("the ranks wait for each other in a circle")
    failed = {0: waiting(0, 1, lost=True), 1: RankReport(1, "training", error="no space left", state={"step": 7})}
    assert "culprit: rank 1: step 7, training: ended with: no space left" in summarise(failed, 2, asked_by="rank 0")


def test_half_a_report_is_none(tmp_path: Path):
    folder = IncidentFolder(tmp_path)
    folder.write(waiting(0, 1))
    (tmp_path / "rank1.json").write_text('{"rank": 1, "phase"')
    assert list(folder.read(2)) == [0]


def test_a_headline_is_waited_for_as_long_as_patience_lasts(tmp_path: Path):
    folder = IncidentFolder(tmp_path)
    assert folder.read_headline(patience=0) is None
    threading.Timer(0.3, folder.write_summary, ["culprit: rank 1\nmore"]).start()
    assert folder.read_headline(patience=20) == "culprit: rank 1"


def watch_nobody(tmp_path: Path, mesh: Mesh) -> watcher.Watcher:
    """The watcher of rank 0 of two, without the other rank and without its thread."""
    alone = watcher.Watcher(mesh.watch, 0, 1, tmp_path, timeout=60.0)
    alone._num_ranks = 2
    return alone


def test_what_goes_wrong_inside_leaves_as_this_ranks_error_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(watcher, "PATIENCE", 0.1)
    mesh = build_mesh(Launch(), num_stages=1, timeout=timedelta(seconds=60))
    said = r"^rank 0: no space left \(.*see "
    with pytest.raises(watcher.RankError, match=said) as raised, watch_nobody(tmp_path, mesh):
        raise OSError("no space left")
    with pytest.raises(watcher.RankError) as again, watch_nobody(tmp_path, mesh):
        raise raised.value
    assert again.value is raised.value
    with pytest.raises(AssertionError, match=r"^a mistake$"), watch_nobody(tmp_path, mesh):
        raise AssertionError("a mistake")


def test_the_answer_of_a_peer_that_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch):
    mesh = build_mesh(Launch(), num_stages=1, timeout=timedelta(seconds=60))
    mesh.watch.wait = Wait((1,), "receiving from rank 1", is_lost=True)
    monkeypatch.setattr(watcher.time, "sleep", lambda _: pytest.fail("it waits"))
    said = watch_nobody(tmp_path, mesh).explain(PeerError("rank 0 lost rank 1"))
    assert "culprit: rank 1" in said


def stop_in_a_step(rank: int, folder: Path) -> str | None:
    """Rank 3 is stopped in its third step; the timeouts are short only from then on, as starting may take longer."""
    chain, inputs, labels = build_dense_chain([3] * 5)
    patient = timedelta(seconds=60)
    mesh = build_mesh(Launch(rank, 4, rank), num_stages=4, timeout=patient)
    pipeline = Pipeline(
        mesh,
        lay_out(backprop(4), (1, 1, 1, 1)),
        build_block=lambda t: (
            inject(Fault(3, "stop", 2, 1, seconds=12), 2, chain.blocks[t]) if t == 3 else chain.blocks[t]
        ),
        build_readout=lambda s: chain.readouts[str(s)],
        loss=chain.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        num_microbatches=2,
        options=StageOptions(record_times=True),
        timeout=patient,
    )
    for _ in range(2):
        pipeline.step(inputs, labels)
    dist.barrier()
    pipeline.stage.transport._timeout = timedelta(seconds=3) + watcher.GRACE  # type: ignore[attr-defined]
    with watcher.Watcher(mesh.watch, rank, 4, folder, timeout=3.0):
        pipeline.step(inputs, labels)
    return None


def test_a_stopped_rank_is_named_by_the_others_which_tell_what_they_did(tmp_path: Path):
    answers = run_local_ranks(stop_in_a_step, 4, tmp_path, may_fail=True)
    assert answers[3] is None  # killed to end the test, when the others had given up
    check_stopped(tmp_path, answers, timeout=3.0)


@pytest.mark.slow
def test_a_rank_stopped_in_a_whole_run_is_named_likewise(tmp_path: Path):
    options = ["--parallel.timeout", str(TIMEOUT), "--training.folder", str(tmp_path)]
    config = parse([*SMALL, *FOUR, *options])
    answers = train_faulty(config, Fault(6, "stop", 2, 1, seconds=2 * TIMEOUT), may_fail=True)
    check_stopped(tmp_path, answers, timeout=TIMEOUT)


def check_stopped(run: Path, answers: list[str | None], *, timeout: float) -> None:
    for rank in range(3):
        assert "culprit: rank 3: wrote nothing: it has died, or is stopped; 3 of 3 others wait" in str(answers[rank])
    (folder,) = run.glob("stall/*")
    assert (folder / "summary.txt").read_text().startswith("culprit: rank 3: wrote nothing")
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert not (folder / "rank3.json").exists()
    for rank, report in enumerate(reports):
        assert report["waits_for"] == [rank + 1]
        assert report["state"]["step"] == 3
        assert report["state"]["action"].startswith("RD")
        assert report["waits_at"] == f"receiving from rank {rank + 1} at {report['state']['action']}"
        assert report["state"]["in_flight"]
        assert report["state"]["buffer_bytes"] > 0
        assert any("MainThread" in name for name in report["stacks"])
    assert max(report["seconds"] for report in reports) >= timeout


def test_a_dead_rank_is_named_long_before_the_timeout(tmp_path: Path):
    config = parse([*SMALL, *FOUR, "--parallel.timeout", "300", "--training.folder", str(tmp_path)])
    answers = train_faulty(config, Fault(2, "die", 2, 1), may_fail=True)
    for rank in (0, 2, 3):
        assert "culprit: rank 1: wrote nothing: it has died, or is stopped" in answers[rank]


@pytest.mark.slow
def test_a_rank_that_takes_too_long_in_a_block_is_named_with_its_action(tmp_path: Path):
    config = parse([*SMALL, *FOUR, "--parallel.timeout", str(TIMEOUT), "--training.folder", str(tmp_path)])
    answers = train_faulty(config, Fault(4, "sleep", 2, 1, seconds=2 * TIMEOUT), may_fail=True)
    for rank in (0, 1, 3):
        assert "culprit: rank 2: step 3, training: waits for nobody; at F2.1 for" in answers[rank]


def test_ranks_that_do_not_come_are_missed_at_start_up(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(PeerError, match=r"rank 0 did not meet the other 1 within 2 s: .*1/2 clients joined"):
        join(Launch(0, 2, 0), "cpu", 2.0)


def wait_for_ever(rank: int, mesh: Mesh, folder: Path) -> None:
    watcher.LAST_RESORT = 1.0
    mesh.watch.rank = rank
    with watcher.Watcher(mesh.watch, rank, 2, folder, timeout=0.5):
        mesh.watch.wait = Wait((1 - rank,), "what never comes")
        threading.Event().wait(60)


def test_a_wait_that_the_library_does_not_end_is_ended_by_force(tmp_path: Path):
    start = time.monotonic()
    mesh = Mesh(0, 2, 0, 1, None, (0, 1))  # type: ignore[arg-type]
    assert run_local_ranks(wait_for_ever, 2, mesh, tmp_path, may_fail=True) == [None, None]
    assert time.monotonic() - start < 50
    assert "in a circle" in next(tmp_path.glob("stall/*/summary.txt")).read_text()
