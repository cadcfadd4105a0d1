"""What ranks read of their data in training: only what they use, the same however it is read, and no other data."""

import re
from pathlib import Path

import numpy as np
import pytest

from mpc_dist.data.dataset import Indices, Noise
from mpc_dist.data.pixels import PictureSplit
from mpc_dist.runtime.local import LocalRankError, run_local_ranks
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.pipeline import Pipeline
from mpc_dist.training import loop
from mpc_dist.training.config import Config
from mpc_dist.training.job import train
from tests.training.local import losses, parse, train_locally
from tests.training.test_evaluation import words, write_noise
from tests.training.test_loop import launch

pytest.importorskip("PIL.Image")

SMALL = words(
    "--model.name res_mlp --model.num_blocks 3 --model.width 6 --data.name image_folder --data.size 4 "
    "--data.mean [0.5] --data.std [0.25] --data.augment true --batch_size 8 --training.log_every 1 "
    "--training.precision float64 --device cpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 training pictures, so that 2 batches are an epoch, and 6 test pictures."""
    found = tmp_path_factory.mktemp("pictures")
    write_noise(found / "train", 10, seed=0)
    write_noise(found / "test", 3, seed=1)
    return found


@pytest.mark.parametrize("steps", ["1", "3", "4"])
def test_a_run_with_processes_goes_on_as_one_without_bit_for_bit(steps: str, folder: Path, tmp_path: Path):
    """Cut in an epoch, at its end and in the next, with any number of processes: what was read ahead is read again."""
    arguments = [*SMALL, "--data.folder", str(folder), *words("--parallel.stages 2 --horizon 1")]
    train_locally([*arguments, *words("--training.steps 6 --training.workers 0")], tmp_path / "whole")
    for last, workers in ((steps, "2"), ("6", "1")):
        again = ["--training.steps", last, "--training.workers", workers]
        train_locally([*arguments, *again], tmp_path / "parts")
    whole, parts = (losses(tmp_path / name, 2) for name in ("whole", "parts"))
    assert whole == parts
    assert {step for step, _, _ in whole} == set(range(1, 7))


def test_batches_that_are_loaded_during_the_step_before_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: also where a run is cut, which has then read a batch that it does not train on."""
    arguments = [*SMALL, "--data.folder", str(folder), *words("--training.workers 0 --training.eval_every 2")]
    train_locally([*arguments, "--training.steps", "6"], tmp_path / "whole")
    loaded: list[object] = []
    load = Pipeline.load
    monkeypatch.setattr(loop, "has_own_queue", lambda _: True)
    monkeypatch.setattr(Pipeline, "load", lambda self, *batch: loaded.append(batch) or load(self, *batch))
    for steps in ("3", "6"):
        train_locally([*arguments, "--training.steps", steps], tmp_path / "parts")
    assert losses(tmp_path / "whole", 1) == losses(tmp_path / "parts", 1)
    assert len(loaded) == 2 + 2  # not in the last step of each


def test_replicas_go_on_from_one_process_with_the_same_pictures(folder: Path, tmp_path: Path):
    """Each reads its half of the batch: mirrored or not as the other layout would have them."""
    arguments = [*SMALL, "--data.folder", str(folder), "--training.workers", "0"]
    train_locally([*arguments, "--training.steps", "6"], tmp_path / "whole")
    train_locally([*arguments, "--training.steps", "3"], tmp_path / "parts")
    halves = words("--training.steps 6 --data_parallel.degree 2 --batch_size 4 --training.workers 1")
    train_locally([*arguments, *halves], tmp_path / "parts")
    whole, parts = losses(tmp_path / "whole", 1), losses(tmp_path / "parts", 2)
    for step in (4, 5, 6):
        mean = (parts[step, "3", 0] + parts[step, "3", 1]) / 2
        assert mean == pytest.approx(whole[step, "3", 0], rel=1e-9)  # the same sums in another order


def count_reads(rank: int, config: Config) -> tuple[int, int]:
    """How many pictures and labels a rank reads."""
    pictures, labels = [], []
    read_inputs, read_labels = PictureSplit.read_inputs, PictureSplit.read_labels

    def count_inputs(self: PictureSplit, indices: Indices, noise: Noise) -> object:
        pictures.extend(indices)
        return read_inputs(self, indices, noise)

    def count_labels(self: PictureSplit, indices: Indices) -> object:
        labels.extend(indices)
        return read_labels(self, indices)

    PictureSplit.read_inputs = count_inputs  # type: ignore[method-assign, assignment]
    PictureSplit.read_labels = count_labels  # type: ignore[method-assign, assignment]
    train(config, Launch(rank, config.num_ranks, rank), is_quiet=True)
    return len(pictures), len(labels)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("--parallel.stages 2 --horizon.windows backprop", [(30, 0), (0, 30)]),
        ("--parallel.stages 2 --horizon 1", [(30, 30), (0, 30)]),
        ("--data_parallel.degree 2 --batch_size 4", [(15, 15), (15, 15)]),
    ],
)
def test_a_rank_reads_only_what_it_uses(layout: str, expected: list[tuple[int, int]], folder: Path, tmp_path: Path):
    """3 steps of 8 and an evaluation of 6: pictures on the first stage, labels where losses are read."""
    arguments = [*SMALL, "--data.folder", str(folder), "--training.folder", str(tmp_path), "--training.workers", "0"]
    config = parse([*arguments, "--training.steps", "3", *words(layout)])
    assert run_local_ranks(count_reads, 2, config) == expected


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_broken_picture_ends_a_job_with_the_line_that_names_it(workers: str, tmp_path: Path):
    """Only one replica meets it: that rank says it, whoever decoded it; the others name that rank."""
    write_noise(tmp_path / "data" / "train", 10, seed=0)
    write_noise(tmp_path / "data" / "test", 3, seed=1)
    (tmp_path / "data" / "train" / "a" / "003.png").write_text("no picture")
    arguments = [*SMALL, "--data.folder", str(tmp_path / "data"), "--training.folder", str(tmp_path / "run")]
    layout = words(f"--data_parallel.degree 2 --batch_size 4 --training.steps 5 --training.workers {workers}")
    done = launch(2, *arguments, *layout, fails=True)
    said = r"train\.py: error: rank \d: picture .*003\.png cannot be read: cannot identify .*; mend or remove it"
    assert len([line for line in done.stderr.splitlines() if re.match(said, line)]) == 1, done.stderr


def test_other_pictures_are_not_gone_on_with_though_equally_many(folder: Path, tmp_path: Path):
    arguments = [*SMALL, "--training.workers", "0", "--training.steps"]
    train_locally([*arguments, "2", "--data.folder", str(folder)], tmp_path / "run")
    # A copy elsewhere is the same data.
    write_noise(tmp_path / "copy" / "train", 10, seed=0)
    write_noise(tmp_path / "copy" / "test", 3, seed=1)
    train_locally([*arguments, "3", "--data.folder", str(tmp_path / "copy")], tmp_path / "run")
    write_noise(tmp_path / "other" / "train", 10, seed=7)
    write_noise(tmp_path / "other" / "test", 3, seed=1)
    other = [*arguments, "4", "--data.folder", str(tmp_path / "other")]
    message = r"training samples of data\.folder .*/other are not those .* --checkpoints\.resume never"
    with pytest.raises(ValueError, match=message):
        train_locally(other, tmp_path / "run")
    with pytest.raises(LocalRankError, match=message):
        train_locally([*other, "--parallel.stages", "2"], tmp_path / "run")
    train_locally([*other, "--checkpoints.resume", "never"], tmp_path / "run")


@pytest.mark.parametrize("data", ["text", "linear", "trigonometric"])
def test_other_samples_of_any_kind_are_not_gone_on_with(data: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(rng.integers(97, 123, 5_000, dtype=np.uint8).tobytes())
    model = "gpt --model.width 8 --model.num_heads 2" if data == "text" else "res_mlp"
    arguments = words(f"--model.name {model} --model.num_blocks 2 --data.name {data} --device cpu --training.steps 2")
    fields = {
        "text": [["--data.context", "8", "--data.path", str(tmp_path / name)] for name in ("one", "other")],
        "linear": [words(f"--data.num_train 100 --data.seed {seed}") for seed in (0, 1)],
        "trigonometric": [words(f"--data.num_train 100 --data.noise_variance {noise}") for noise in (0.03, 0.04)],
    }
    one, other = ([*arguments, "--batch_size", "8", *given] for given in fields[data])
    train_locally(one, tmp_path / "run")
    train_locally([*one, "--training.steps", "3"], tmp_path / "run")
    with pytest.raises(ValueError, match=r"training samples of data\.(path|name) .* are not those"):
        train_locally([*other, "--training.steps", "4"], tmp_path / "run")
