"""Saving on several ranks: whatever goes wrong on one is known to all, and costs no other checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist

from mpc_dist.runtime.local import run_local_ranks
from mpc_dist.training.checkpoint import CheckpointSaver, newest_undamaged
from mpc_dist.training.checkpoint_folder import Digest, list_checkpoints, step_of


def save_without_a_digest(rank: int, folder: Path) -> list[str | None]:
    """Rank 1 cannot read back its part of the first checkpoint; the second is as it should be."""
    saver = CheckpointSaver(folder, keep=3, fingerprint={}, rank=rank, group=dist.group.WORLD)
    read = Digest.of
    if rank == 1:
        Digest.of = classmethod(lambda cls, path: Path("nowhere").stat())  # type: ignore[assignment,method-assign]
    saver.save(1, {f"blocks.{rank}.weight": torch.ones(3)}, {})
    saver.wait()
    Digest.of = read  # type: ignore[method-assign]
    saver.save(2, {f"blocks.{rank}.weight": torch.ones(3)}, {})
    saver.wait()
    return [outcome.failure for outcome in saver.take_outcomes()]


def test_after_a_save_that_failed_late_on_one_rank_the_next_succeeds(tmp_path: Path):
    for first, second in run_local_ranks(save_without_a_digest, 2, tmp_path):
        assert "rank 1: FileNotFoundError" in first
        assert second is None
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2]


def save_elsewhere(rank: int, folder: Path) -> str | None:
    saver = CheckpointSaver(folder / str(rank), keep=3, fingerprint={}, rank=rank, group=dist.group.WORLD)
    saver.save(1, {f"blocks.{rank}.weight": torch.ones(3)}, {})
    saver.wait()
    return saver.take_outcomes()[0].failure


def test_folders_that_hosts_do_not_share_are_noticed_when_saving(tmp_path: Path):
    failures = run_local_ranks(save_elsewhere, 2, tmp_path)
    assert all("must be one that all hosts see" in failure for failure in failures)


def test_what_was_just_saved_is_never_dropped(tmp_path: Path):
    saver = CheckpointSaver(tmp_path, keep=1, fingerprint={})
    for step in (6, 8, 7):  # 8 is damaged, say, so that training went on from 6
        saver.save(step, {"blocks.0.weight": torch.ones(3)}, {})
        saver.wait()
        assert step in [step_of(path) for path in list_checkpoints(tmp_path)]


def save_on_a_rank(rank: int, folder: Path) -> str | None:
    """Rank 1 finds a file where its part should be written; the others must not wait for it."""
    name = "shard-00002-model-00001-of-00001.safetensors"
    if rank == 1:
        (folder / "step-00000001.partial" / name).mkdir(parents=True)
    saver = CheckpointSaver(folder, keep=3, fingerprint={}, rank=rank, group=dist.group.WORLD)
    saver.save(1, {f"blocks.{rank}.weight": torch.ones(3)}, {})
    saver.wait()
    (outcome,) = saver.take_outcomes()
    return outcome.failure


def test_a_save_that_fails_on_one_rank_is_known_to_all(tmp_path: Path):
    failures = run_local_ranks(save_on_a_rank, 3, tmp_path)
    assert all(failure is not None and "rank 1: IsADirectoryError" in failure for failure in failures)
    assert list_checkpoints(tmp_path) == []


def test_an_interrupted_save_leaves_the_last_good_one(tmp_path: Path):
    saver = CheckpointSaver(tmp_path, keep=3, fingerprint={})
    saver.save(1, {"blocks.0.weight": torch.ones(3)}, {})
    saver.wait()
    (tmp_path / "step-00000002.partial").mkdir()
    (tmp_path / "step-00000002.partial" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    saved, damages = newest_undamaged(list_checkpoints(tmp_path))
    assert saved is not None
    assert (saved.state.step, damages) == (1, [])
    assert torch.equal(saved.read_all(["blocks.0.weight"])["blocks.0.weight"], torch.ones(3))
