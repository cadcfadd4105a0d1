"""Numbers that are not finite: found where they appear, and the step is stopped or skipped on all ranks alike."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpc_dist.data.reading import Part
from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints, step_of
from mpc_dist.training.metrics import read_metrics
from tests.training.faulty import SMALL, Fault, train_faulty
from tests.training.local import losses, parse, train_locally

SLIDING = "--horizon.windows sliding --horizon.size 2"
STAGES = f"--parallel.stages 3 {SLIDING} --training.steps 5 --checkpoints.every 2".split()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = SavedCheckpoint(list_checkpoints(folder_of(folder))[-1])
    return saved.read_all([name for name in saved.described if not name.startswith("random.")])


# 6 blocks on 3 stages: blocks 2 and 3 are rank 1's. In step 3 (from 1), so that the checkpoint after step 2 is there.
PLACES = [
    (
        SLIDING,
        Fault(2, "activation", 2, 1),
        "activation of block 2 in micro-batch 1",
        1,
    ),
    (SLIDING, Fault(3, "adjoint", 2, 2), "adjoint of block 3 in micro-batch 2", 1),
    ("--horizon 1", Fault(3, "gradient", 2, 1), "gradient of block 3 in micro-batch 1", 1),
    (
        f"{SLIDING} --parallel.split true",
        Fault(2, "adjoint", 2, 0),
        "adjoint of block 2 in micro-batch 0",
        1,
    ),
    ("--horizon 1", Fault(5, "activation", 2, 0), "activation of block 5 in micro-batch 0", 2),
]


@pytest.mark.parametrize(("windows", "fault", "place", "rank"), PLACES, ids=lambda value: str(value))
def test_a_number_that_is_not_finite_stops_all_ranks_and_is_blamed_on_the_rank_where_it_appears(
    tmp_path: Path, windows: str, fault: Fault, place: str, rank: int
):
    config = parse([*SMALL, *STAGES, *windows.split(), "--training.folder", str(tmp_path)])
    answers = train_faulty(config, fault, may_fail=True)
    for found in answers:
        assert f"culprit: rank {rank}: a number that is not finite: {place}" in found
    (summary,) = tmp_path.glob("stall/*/summary.txt")
    assert summary.read_text().startswith(f"culprit: rank {rank}: a number that is not finite: {place}")
    # The last good checkpoint is intact, and nothing later was kept.
    (kept,) = list_checkpoints(folder_of(tmp_path))
    assert step_of(kept) == 2
    assert all(value.isfinite().all() for value in weights(tmp_path).values() if value.is_floating_point())


def test_a_single_process_names_block_and_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mpc_dist.training import job
    from tests.training.faulty import FaultyParts, build_parts

    fault = Fault(4, "activation", 1, 2)
    monkeypatch.setattr(job, "build_parts", lambda *a, **k: FaultyParts(build_parts(*a, **k), fault, 3))
    with pytest.raises(ValueError, match="step 2: not finite: activation of block 4 in micro-batch 2; nothing of this"):
        train_locally([*SMALL, "--training.steps", "4"], tmp_path)


def test_data_that_is_not_finite_is_blamed_on_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    to = Part.to
    monkeypatch.setattr(Part, "to", lambda self, dtype: replace(to(self, dtype), inputs=self.inputs / 0))
    with pytest.raises(ValueError, match="step 1: not finite: data of block 0 in micro-batch 0"):
        train_locally([*SMALL, "--training.steps", "1"], tmp_path)


@pytest.mark.parametrize("how", ["activation", "gradient"])
def test_a_skipped_step_leaves_every_rank_and_replica_as_if_it_had_not_been(tmp_path: Path, how: Any):
    """Other than its rate schedule and its data, which go on: compared with a run whose third step learns nothing."""
    layout = f"--parallel.stages 3 --data_parallel.degree 2 {SLIDING} --training.steps 3 --optimizer.name sgd".split()
    skipped, plain = tmp_path / "skipped", tmp_path / "plain"
    both = [*SMALL, *layout, "--training.on_nonfinite", "skip"]
    config = parse([*both, "--training.folder", str(skipped)])
    train_faulty(config, Fault(3, how, 2, 1, replica=1))
    two = parse([*both, "--training.folder", str(plain), "--training.steps", "2"])
    train_faulty(two, None)
    found, expected = weights(skipped), weights(plain)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for rank in range(6):
        lines = read_metrics(skipped, rank)
        (line,) = (one for one in lines if one["event"] == "skipped")
        assert line["step"] == 3
        assert line["num_skipped"] == 1
        assert lines[-1]["skipped_steps"] == 1
    # Stage 1 of replica 1 is rank 3.
    (at_origin,) = (one for one in read_metrics(skipped, 3) if one["event"] == "skipped")
    assert at_origin["finding"] == {"what": how, "block": 3, "microbatch": 1, "is_received": False}


def test_ignoring_goes_on_with_what_is_not_finite(tmp_path: Path):
    config = parse([*SMALL, *STAGES, "--training.on_nonfinite", "ignore", "--training.folder", str(tmp_path)])
    train_faulty(config, Fault(2, "activation", 2, 1))
    found = losses(tmp_path, 3)
    assert math.isnan(found[5, "6", 0])


def test_looking_at_numbers_changes_none(tmp_path: Path):
    for policy in ("stop", "skip", "ignore"):
        train_locally([*SMALL, *STAGES, "--training.on_nonfinite", policy], tmp_path / policy)
    assert losses(tmp_path / "stop", 3) == losses(tmp_path / "ignore", 3) == losses(tmp_path / "skip", 3)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path):
    """An update of finite gradients may overflow; the next step would tell, but the checkpoint comes before it."""
    huge = "--optimizer.name sgd --optimizer.lr 1e38 --training.steps 1".split()
    with pytest.raises(ValueError, match=r"step 1: .* not finite after the update; not saved"):
        train_locally([*SMALL, *huge, "--optimizer.weight_decay", "100"], tmp_path)
    assert not list_checkpoints(folder_of(tmp_path))
    train_locally([*SMALL, *huge, "--optimizer.weight_decay", "100", "--training.on_nonfinite", "ignore"], tmp_path)
    assert list_checkpoints(folder_of(tmp_path))
