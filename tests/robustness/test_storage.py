"""Storage that fails: a full disk, a read-only folder, a changed file, two jobs in one folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpc_dist.document import write_whole
from mpc_dist.training.checkpoint import newest_undamaged
from mpc_dist.training.checkpoint_folder import find_damage, folder_of, list_checkpoints, step_of
from mpc_dist.training.run_lock import LOCK_FILE, RunLockedError, lock_run
from tests.robustness import entry
from tests.training.local import train_locally

GPT = (
    "--model.name gpt --model.num_blocks 2 --model.width 16 --model.num_heads 2 --data.context 8 --data.max_bytes 4000 "
    "--batch_size 4 --training.log_every 1 --training.eval_batches 1 --device cpu --checkpoints.every 1"
).split()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, *, leave: int) -> None:
    """Use up the disk but for so many bytes."""
    state = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        file.write(bytes(max(0, state.f_bavail * state.f_bsize - leave)))


def test_a_full_disk_loses_no_checkpoint_and_the_run_goes_on_once_there_is_room(small_disk: Path):
    run = small_disk / "run"
    train_locally([*GPT, "--training.steps", "1"], run)
    fill(small_disk, leave=40 << 10)  # enough for metrics, too little for a checkpoint
    with pytest.raises(OSError, match=r"last checkpoint could not be saved: .*No space left on device"):
        train_locally([*GPT, "--training.steps", "3"], run)
    assert [step_of(path) for path in list_checkpoints(folder_of(run))] == [1]
    assert [path.name for path in folder_of(run).iterdir()] == ["step-00000001"], "what was begun is gone"
    assert find_damage(folder_of(run) / "step-00000001") is None
    (small_disk / "filler").unlink()
    train_locally([*GPT, "--training.steps", "3"], run)
    assert step_of(list_checkpoints(folder_of(run))[-1]) == 3


def test_a_disk_without_a_byte_left_is_said_with_the_file(small_disk: Path):
    run = small_disk / "run"
    train_locally([*GPT, "--training.steps", "1"], run)
    before = (run / "config.yaml").read_text()
    fill(small_disk, leave=0)
    answer = entry.train(*GPT, "--training.steps", "3", "--training.folder", str(run))
    assert answer.code == 2
    assert answer.failure is None
    assert "No space left on device" in answer.error
    assert str(run) in answer.error
    assert find_damage(folder_of(run) / "step-00000001") is None
    assert (run / "config.yaml").read_text() == before
    assert (run / "metrics-rank0.jsonl").read_text().count('"event": "step"') == 1, "what was measured is still there"


def test_a_read_only_folder_is_refused_and_can_be_gone_on_from_elsewhere(small_disk: Path, tmp_path: Path):
    train_locally([*GPT, "--training.steps", "1"], small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk / "run", small_disk / "new" / "run"):
        answer = entry.train(*GPT, "--training.steps", "2", "--training.folder", str(folder))
        assert (answer.code, answer.failure) == (2, None)
        assert "Read-only file system" in answer.error
        assert str(folder.parent) in answer.error
    train_locally([*GPT, "--training.steps", "2", "--checkpoints.resume", str(small_disk / "run")], tmp_path / "other")
    assert [step_of(path) for path in list_checkpoints(folder_of(tmp_path / "other"))] == [2]


def test_a_file_is_replaced_whole_or_not_at_all(small_disk: Path):
    path = small_disk / "plan.yaml"
    write_whole(path, "before\n")
    fill(small_disk, leave=0)
    with pytest.raises(OSError, match=r"plan.yaml cannot be written: No space left on device"):
        write_whole(path, "x" * 100_000)
    assert path.read_text() == "before\n"
    assert sorted(one.name for one in small_disk.iterdir()) == ["filler", "plan.yaml"]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "another step": lambda content: content.replace(b'"step": 2', b'"step": 1'),
    "a flipped bit": lambda content: content[:-40] + bytes([content[-40] ^ 1]) + content[-39:],
    "a cut": lambda content: content[:-30],
    "nothing left": lambda content: b"",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_what_a_checkpoint_says_of_itself_is_found(how: str, tmp_path: Path):
    train_locally([*GPT, "--training.steps", "2"], tmp_path / "run")
    first, second = list_checkpoints(folder_of(tmp_path / "run"))
    state = second / "state.json"
    changed = CHANGES[how](state.read_bytes())
    assert changed != state.read_bytes()
    state.write_bytes(changed)
    saved, damages = newest_undamaged([first, second])
    assert saved is not None
    assert saved.path == first
    assert "state.json" in damages[0]


HOLD = "import sys, time; from pathlib import Path; from mpc_dist.training.run_lock import lock_run\n"
HOLD += "with lock_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of `run`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_job_in_the_folder_is_refused_and_the_first_undisturbed(other_job, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("mpc_dist.training.auto.lock_run", lambda folder, rank: lock_run(folder, rank=rank, patience=0))
    answer = entry.train(*GPT, "--training.folder", str(tmp_path / "run"))
    assert (answer.code, answer.failure) == (2, None)
    assert f"run is in use by another job (process {other_job.pid} on " in answer.error
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_job_leaves_no_lock(end: signal.Signals, other_job, tmp_path: Path):
    with pytest.raises(RunLockedError), lock_run(tmp_path / "run", patience=0):
        pass
    other_job.send_signal(end)
    other_job.wait()
    with lock_run(tmp_path / "run", patience=0):
        assert (tmp_path / "run" / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_job_that_is_just_ending_is_waited_for(other_job, tmp_path: Path):
    start = time.monotonic()
    other_job.send_signal(signal.SIGSTOP)  # it is alive and holds the lock, but for a moment
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other_job.pid}"])
    with lock_run(tmp_path / "run", patience=60):
        assert time.monotonic() - start >= 0.4
    killer.wait()


def test_work_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path):
    def fail() -> None:
        assert (tmp_path / "a" / "b" / LOCK_FILE).exists()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), lock_run(tmp_path / "a" / "b"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_rely_on_the_first(tmp_path: Path):
    with lock_run(tmp_path / "run", rank=1):
        assert not (tmp_path / "run").exists()
