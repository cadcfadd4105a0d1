"""The loss scale: exact, the same on every rank, and part of a checkpoint."""

from pathlib import Path

import pytest
import torch

from mpc_dist.runtime.guard import MOST_SKIPPED, Guard, NonFiniteError
from mpc_dist.runtime.loss_scale import LARGEST, LossScale
from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.metrics import read_metrics
from tests.training.faulty import SMALL
from tests.training.local import losses, parse, train_locally

RANKS = "--parallel.stages 2 --data_parallel.degree 2 --horizon 1 --training.clip_norm 0.5 --training.steps 4".split()
HALF = (
    "--model.name gpt --model.num_blocks 4 --model.width 16 --model.num_heads 2 --data.name text --data.context 16 "
    "--data.max_bytes 40000 --batch_size 8 --parallel.microbatches 2 --training.log_every 1 --training.eval_batches 1 "
    "--device cpu --training.precision float16 --parallel.stages 2 --horizon 1"
).split()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    saved = SavedCheckpoint(list_checkpoints(folder_of(folder))[-1])
    return saved.read_all([name for name in saved.described if not name.startswith("random.")])


def test_it_is_halved_by_an_overflow_and_doubled_by_patience():
    scale = LossScale(4.0, interval=3)
    seen = []
    for has_overflowed in (False, False, False, True, False, False, True, True, True, True):
        scale.update(has_overflowed=has_overflowed)
        seen.append(scale.value)
    assert seen == [4, 4, 8, 4, 4, 4, 2, 1, 1, 1]
    top = LossScale(LARGEST, interval=1)
    top.update(has_overflowed=False)
    assert top.value == LARGEST


def test_numbers_are_looked_at_if_a_policy_or_a_scale_needs_it():
    scale = LossScale(8.0)
    assert [Guard("ignore").is_on, Guard("stop").is_on, Guard("skip").is_on] == [False, True, True]
    assert [Guard(policy, scale).is_on for policy in ("ignore", "stop", "skip")] == [True] * 3
    assert [Guard(policy).may_skip for policy in ("ignore", "stop", "skip")] == [False, False, True]
    assert Guard("ignore", scale).may_skip


def test_so_many_steps_in_a_row_that_come_to_nothing_are_an_error():
    guard = Guard("skip")

    def decide(value: float) -> object:
        guard.see("loss", 0, 0, torch.tensor(value))
        return guard.decide(step=1)

    bad = float("nan")
    for _ in range(2):  # a good step between them begins anew
        for _ in range(MOST_SKIPPED):
            assert decide(bad) is not True
        assert decide(1.0) is True
    assert guard.num_skipped == 2 * MOST_SKIPPED
    for _ in range(MOST_SKIPPED):
        decide(bad)
    with pytest.raises(NonFiniteError, match=f"{MOST_SKIPPED} steps in a row"):
        decide(bad)


def test_a_guard_goes_on_with_its_scale_and_its_counts():
    guard = Guard("skip", LossScale(8.0, interval=2))
    guard.scale.update(has_overflowed=True)
    guard.scale.update(has_overflowed=False)  # half of the patience
    guard.num_skipped, guard._in_a_row = 3, 2
    other = Guard("skip", LossScale(64.0, interval=2))
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == guard.state_dict()
    other.scale.update(has_overflowed=False)
    assert other.scale.value == 8
    # Of a run without a scale: this one's begins.
    fresh = Guard("skip", LossScale(64.0, interval=2))
    fresh.load_state_dict(Guard("skip").state_dict() | {"num_skipped": 1})
    assert (fresh.scale.value, fresh.num_skipped) == (64, 1)


def test_only_powers_of_two_are_exact():
    for value in ("60000", "0.5", "1e30"):
        with pytest.raises(ValueError, match=r"loss_scale_start: a loss scale of .* is not a power of two"):
            parse([*SMALL, "--training.loss_scale_start", value])
    with pytest.raises(ValueError, match="loses the small gradients"):
        parse([*HALF, "--training.loss_scale", "off"])
    with pytest.raises(ValueError, match="deepspeed cannot leave out a step"):
        parse([*SMALL, *RANKS, "--data_parallel.sharding", "deepspeed", "--training.loss_scale", "dynamic"])


def test_with_finite_gradients_a_scaled_run_is_the_unscaled_one_bit_for_bit(tmp_path: Path):
    for name in ("dynamic", "off"):
        train_locally([*SMALL, *RANKS, "--training.loss_scale", name], tmp_path / name)
    assert losses(tmp_path / "dynamic", 4) == losses(tmp_path / "off", 4)
    scaled, plain = weights(tmp_path / "dynamic"), weights(tmp_path / "off")
    assert set(scaled) == set(plain)
    for name, value in plain.items():
        assert torch.equal(scaled[name], value), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in float16 from a scale that overflows at first, and is doubled after 2 good steps."""
    folder = tmp_path_factory.mktemp("float16")
    train_locally([*HALF, *START, "--training.steps", "6"], folder)
    return folder


START = "--training.loss_scale_start 262144 --training.loss_scale_interval 2".split()


def scales(folder: Path, rank: int) -> list[tuple[int, float]]:
    return [(one["step"], one["scale"]["value"]) for one in read_metrics(folder, rank) if one["event"] == "skipped"]


def test_in_float16_all_ranks_skip_and_halve_together(whole: Path):
    first = scales(whole, 0)
    assert first == scales(whole, 1)
    assert first[0] == (1, 2.0**17)
    assert len(first) < 6
    found = losses(whole, 2)
    assert found[6, "4", 0] < found[1, "4", 0]


def test_a_run_in_float16_goes_on_bit_for_bit(whole: Path, tmp_path: Path):
    for steps in ("3", "6"):
        train_locally([*HALF, *START, "--training.steps", steps], tmp_path)
    found, expected = weights(tmp_path), weights(whole)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert scales(tmp_path, 1) == scales(whole, 1)
    states = [SavedCheckpoint(list_checkpoints(folder_of(run))[-1]).state for run in (tmp_path, whole)]
    assert states[0].progress["numbers"] == states[1].progress["numbers"]
