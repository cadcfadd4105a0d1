"""Scores of the test set: all that is asked for, the same for every layout, and as plain torch finds them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpc_dist.training.checkpoint import SavedCheckpoint
from mpc_dist.training.checkpoint_folder import folder_of, list_checkpoints
from mpc_dist.training.metrics import read_metrics
from tests.training.local import parse, train_locally

Image = pytest.importorskip("PIL.Image")

SMALL = (
    "--model.name res_mlp --model.num_blocks 3 --model.width 6 --data.name image_folder --data.size 4 "
    "--data.mean [0.5] --data.std [0.25] --batch_size 16 --training.steps 2 --training.eval_every 1 "
    "--training.precision float64 --device cpu --training.workers 0 --readout.kind local"
).split()


def words(text: str) -> list[str]:
    return text.split()


def write_noise(folder: Path, count: int, seed: int) -> None:
    """Pictures of pure noise in two classes: nothing can be learnt, half of all guesses are right."""
    rng = np.random.default_rng(seed)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / name / f"{number:03}.png")


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("noise")
    write_noise(folder / "train", 20, seed=0)
    write_noise(folder / "test", 300, seed=1)
    return folder


def plain_score(run: Path, pictures: list[tuple[Path, int]]) -> tuple[float, float]:
    """Loss and accuracy of a run's last weights on these pictures, in torch and nothing else."""
    saved = SavedCheckpoint(list_checkpoints(folder_of(run))[-1])
    layers = ("blocks.0.1", "blocks.1", "blocks.2")  # the first block flattens its input before
    names = [f"{layer}.linear.{kind}" for layer in layers for kind in ("weight", "bias")]
    weights = saved.read_all(names)
    w0, b0, w1, b1, w2, b2 = (weights[name] for name in names)
    total, correct = 0.0, 0
    for path, label in pictures:
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1).float()
        x = ((pixels / 255 - 0.5) / 0.25).double().flatten()
        x = F.relu(w0 @ x + b0)
        x = x + F.relu(w1 @ x + b1)
        logits = w2 @ x + b2
        total += float(F.cross_entropy(logits[None], torch.tensor([label])))
        correct += int(logits.argmax()) == label
    return total / len(pictures), correct / len(pictures)


def sorted_pictures(folder: Path) -> list[tuple[Path, int]]:
    return [(path, label) for label, name in enumerate(("a", "b")) for path in sorted((folder / name).iterdir())]


def scores_of(run: Path, num_ranks: int, last: str = "3") -> list[list[dict[str, float]]]:
    """What each evaluation found at the last boundary, on every rank that reads it."""
    lines = [[line for line in read_metrics(run, rank) if line["event"] == "evaluation"] for rank in range(num_ranks)]
    found = [[line["scores"][last] for line in own if last in line["scores"]] for own in lines]
    return [scores for scores in found if scores]


def test_the_whole_test_set_is_scored_whatever_its_order(noise: Path, tmp_path: Path):
    """Of pictures sorted by class, the first ones are of one class: scoring them alone would say anything."""
    train_locally(
        [*SMALL, "--data.folder", str(noise), *words("--training.steps 20 --training.eval_every 20")], tmp_path
    )
    ((score,),) = scores_of(tmp_path, 1)
    loss, accuracy = plain_score(tmp_path, sorted_pictures(noise / "test"))
    assert score["accuracy"] == accuracy
    assert score["loss"] == pytest.approx(loss, rel=1e-9)
    assert abs(accuracy - 0.5) < 0.08  # 600 guesses: four times their spread
    (start,) = [line for line in read_metrics(tmp_path, 0) if line["event"] == "start"]
    assert start["test_samples"] == {"scored": 600, "of": 600}


LAYOUTS = {
    "one process": "",
    "micro-batches": "--parallel.microbatches 4",
    "2 stages": "--parallel.stages 2 --parallel.microbatches 2",
    "2 replicas": "--data_parallel.degree 2",
    "2 stages x 2 replicas": "--parallel.stages 2 --data_parallel.degree 2 --horizon 1",
}
FROZEN = ["--optimizer.name", "sgd", "--optimizer.lr", "0"]
"""Every layout keeps the same weights."""


@pytest.fixture(scope="module")
def few(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """35 test pictures: no batch divides them, and replicas get unequal shares."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "train").symlink_to(noise / "train")
    for name, count in (("a", 20), ("b", 15)):
        (folder / "test" / name).mkdir(parents=True)
        for path in sorted((noise / "test" / name).iterdir())[:count]:
            (folder / "test" / name / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_scores_the_same_samples_every_time(layout: str, few: Path, tmp_path: Path):
    config = train_locally([*SMALL, *FROZEN, "--data.folder", str(few), *LAYOUTS[layout].split()], tmp_path)
    loss, accuracy = plain_score(tmp_path, sorted_pictures(few / "test"))
    found = scores_of(tmp_path, config.num_ranks)
    assert len(found) == config.data_parallel.degree
    for first, second in found:
        assert first == second  # nothing was learnt between the two
        assert first["accuracy"] == accuracy
        assert first["loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("layout", ["one process", "2 stages x 2 replicas"])
def test_so_many_batches_are_a_choice_by_the_seed(layout: str, few: Path, tmp_path: Path, capfd):
    """One batch of 16: of the whole set, in no order of the files, whatever the layout."""
    arguments = [*SMALL, *FROZEN, "--data.folder", str(few), *words("--training.eval_batches 1 --seed 3")]
    config = train_locally([*arguments, *LAYOUTS[layout].split()], tmp_path)
    chosen = np.random.default_rng([5, 3]).permutation(35)[:16]  # 5: see mpc_dist/data/dataset.py
    pictures = sorted_pictures(few / "test")
    loss, accuracy = plain_score(tmp_path, [pictures[index] for index in chosen])
    for first, second in scores_of(tmp_path, config.num_ranks):
        assert first == second
        assert (first["accuracy"], first["loss"]) == (accuracy, pytest.approx(loss, rel=1e-9))
    if config.num_ranks == 1:  # others have an error stream of their own
        assert "every evaluation scores 16 of the 35 test samples (training.eval_batches)" in capfd.readouterr().err


def test_a_test_set_smaller_than_the_number_of_replicas_is_scored(few: Path, tmp_path: Path):
    (tmp_path / "data" / "test" / "b").mkdir(parents=True)
    (tmp_path / "data" / "train").symlink_to(few / "train")
    (tmp_path / "data" / "test" / "b" / "only.png").symlink_to(few / "test" / "b" / "000.png")
    train_locally([*SMALL, "--data.folder", str(tmp_path / "data"), "--data_parallel.degree", "2"], tmp_path / "run")
    loss, accuracy = plain_score(tmp_path / "run", [(few / "test" / "b" / "000.png", 1)])
    for scores in scores_of(tmp_path / "run", 2):
        assert scores[-1] == {"accuracy": accuracy, "loss": pytest.approx(loss, rel=1e-9)}


@pytest.mark.parametrize(
    ("given", "num_samples", "scored"),
    [("null", 9_000, 9_000), ("null", 50_000, 10_000), ("all", 50_000, 50_000), ("3", 50_000, 48), ("3", 20, 20)],
)
def test_how_much_is_scored(given: str, num_samples: int, scored: int):
    assert parse(["--training.eval_batches", given]).training.count_tested(num_samples, 16) == scored


@pytest.mark.parametrize("given", ["0", "-1", "some", "1.5"])
def test_what_is_no_number_of_batches_is_refused(given: str):
    with pytest.raises(ValueError, match=r"training\.eval_batches"):
        parse(["--training.eval_batches", given])


def test_one_model_is_scored_though_replicas_have_seen_other_samples(tmp_path: Path):
    """Batch norm keeps statistics of its own on each replica; the first one's are what a checkpoint stands for."""
    arguments = words("--config configs/resnet_digits.yaml --model.blocks_per_group 1 --training.steps 3")
    arguments += words(
        "--training.log_every 1 --training.eval_every 2 --checkpoints.every 3 --training.precision float64"
    )
    arguments += words("--data_parallel.degree 2 --parallel.stages 2 --batch_size 16")
    last = str(train_locally(arguments, tmp_path).model.num_blocks)
    (with_two,) = {json.dumps(scores[-1]) for scores in scores_of(tmp_path, 4, last)}
    # The same folder with one replica: nothing is left to train, and the model is scored.
    train_locally([*arguments, *words("--data_parallel.degree 1 --batch_size 32")], tmp_path)
    with_one = scores_of(tmp_path, 2, last)[-1][-1]
    assert json.loads(with_two)["accuracy"] == with_one["accuracy"]
    assert json.loads(with_two)["loss"] == pytest.approx(with_one["loss"], rel=1e-9)
    # Training does not depend on when it is scored.
    seldom = tmp_path / "seldom"
    train_locally([*arguments, *words("--training.eval_every 100")], seldom)
    often, rare = (SavedCheckpoint(list_checkpoints(folder_of(run))[-1]) for run in (tmp_path, seldom))
    names = [name for name in often.described if not name.startswith("random.")]
    kept, expected = often.read_all(names), rare.read_all(names)
    assert all(torch.equal(kept[name], expected[name]) for name in names)
    # Each replica has its own statistics.
    means = [name for name in names if name.endswith("running_mean") and name.startswith("buffers.0.")]
    assert any(not torch.equal(kept[name], kept[name.replace("buffers.0.", "buffers.1.")]) for name in means)
