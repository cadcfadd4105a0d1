"""Batches: deterministic, the same for whoever asks, and resumable mid-epoch."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mpc_dist.data import Batches, Split
from mpc_dist.data.dataset import Indices, Noise, select_tests
from mpc_dist.data.image_folder import FolderPictures
from mpc_dist.data.images import ImageSplit
from mpc_dist.data.pixels import PictureSettings, PictureSplit
from mpc_dist.data.text import TokenSplit


def numbered(count: int = 10) -> Split:
    return Split.of_tensors(torch.arange(count), torch.arange(count) * 10)


@dataclass(frozen=True)
class NoisySplit(Split):
    """Samples that are augmented at random."""

    num_samples: int = 0
    num_random: int = 1

    def read_inputs(self, indices: Indices, noise: Noise) -> torch.Tensor:
        return torch.from_numpy(indices + noise[:, 0])

    def read_labels(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(indices)


def noisy(count: int = 10) -> Split:
    return NoisySplit(count)


def take(batches: Batches, count: int) -> list[list[float]]:
    return [inputs.tolist() for inputs, _ in itertools.islice(batches, count)]


def test_an_epoch_reads_every_sample_once_in_an_order_of_its_own():
    batches = Batches(numbered(), batch_size=2, seed=0)
    first, second = (sorted(itertools.chain(*epoch)) for epoch in (take(batches, 5), take(batches, 5)))
    assert first == second == list(range(10))
    batches = Batches(numbered(), batch_size=2, seed=0)
    assert take(batches, 5) != take(batches, 5)


def test_inputs_and_labels_stay_together():
    for inputs, labels in itertools.islice(Batches(numbered(), batch_size=3, seed=0), 7):
        assert torch.equal(labels, inputs * 10)


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    first, again, other = (take(Batches(noisy(), batch_size=3, seed=seed), 9) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_batches_do_not_depend_on_the_global_random_state():
    torch.manual_seed(0)
    first = take(Batches(noisy(), batch_size=3, seed=1), 3)
    torch.manual_seed(1)
    np.random.seed(5)
    assert take(Batches(noisy(), batch_size=3, seed=1), 3) == first


def test_a_short_last_batch_is_left_out():
    batches = Batches(numbered(), batch_size=4, seed=0)
    assert batches.batches_per_epoch == 2
    assert [len(batch) for batch in take(batches, 5)] == [4] * 5


def test_without_shuffling_the_order_is_that_of_the_data():
    assert take(Batches(numbered(), batch_size=5, seed=0, shuffle=False), 3) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize("steps", range(8))
def test_a_restored_state_continues_exactly(steps):
    undisturbed = take(Batches(noisy(), batch_size=3, seed=4), 14)
    batches = Batches(noisy(), batch_size=3, seed=4)
    head = take(batches, steps)
    state = batches.state_dict()
    take(batches, 2)  # what happens after saving does not matter
    resumed = Batches(noisy(), batch_size=3, seed=4)
    resumed.load_state_dict(state)
    assert resumed.epoch == steps // 3
    assert head + take(resumed, 14 - steps) == undisturbed


@pytest.mark.parametrize("other_size", [1, 2, 4, 5])
@pytest.mark.parametrize("steps", range(4))
def test_a_state_of_another_batch_size_goes_on_after_the_samples_seen(steps, other_size):
    batches = Batches(numbered(), batch_size=3, seed=4)
    seen = [sample for batch in take(batches, steps) for sample in batch]
    resumed = Batches(numbered(), batch_size=other_size, seed=4)
    resumed.load_state_dict(batches.state_dict())
    if resumed.epoch == 0:
        left = resumed.batches_per_epoch - -(-len(seen) // other_size)
        after = [sample for batch in take(resumed, left) for sample in batch]
        assert not set(seen) & set(after)
    else:
        assert 10 - len(seen) < 3 + other_size  # nothing but an incomplete batch was left


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "saved data state has seed 5 but this run 4; resume with the settings"),
        (
            {"fingerprint": "2-another"},
            r"samples of the data set are not those .* --checkpoints\.resume never",
        ),
        ({"batch_size": 0}, "batch size of the saved data state: 0 is out of range"),
        ({"shuffle": 0}, "saved data state has shuffle 0 but this run 1"),
        ({"num_samples": 11}, "saved data state has num_samples 11 but this run 10"),
        ({"batch": 3}, r"batch of the saved data state: 3 is out of range; use 0\.\.2"),
        ({"epoch": -1}, "epoch of the saved data state: -1 is out of range"),
        ({"epoch": None}, "must be a whole number, got None"),
    ],
)
def test_a_state_of_another_sequence_is_refused(change, message):
    batches = Batches(numbered(), batch_size=3, seed=4)
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict({**batches.state_dict(), **change})


def test_augmentation_differs_from_batch_to_batch_and_from_epoch_to_epoch():
    """The same sample drawn again, in another batch or epoch, is changed in another way."""
    batches = Batches(noisy(2), batch_size=1, seed=0, shuffle=False)
    noise = [inputs.item() % 1 for inputs, _ in itertools.islice(batches, 6)]
    assert len(set(noise)) == 6


def test_seeds_that_could_meet_another_seeds_stream_are_refused():
    with pytest.raises(ValueError, match="seed 4294967296 is out of range"):
        Batches(numbered(), batch_size=2, seed=2**32)


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_size_that_cannot_be_filled_is_refused(batch_size):
    with pytest.raises(ValueError, match=rf"batch size {batch_size} is out of range; use 1\.\.10"):
        Batches(numbered(), batch_size=batch_size, seed=0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_part_of_a_batch_is_the_same_whoever_reads_the_rest(replicas):
    """Replicas read their parts alone: sample for sample they are those of the whole batch, augmentation included."""
    whole = list(itertools.islice(Batches(noisy(), batch_size=4, seed=3), 5))
    for replica in range(replicas):
        alone = Batches(noisy(), batch_size=4, seed=3)
        for inputs, labels in whole:
            part = noisy().read(alone.select().part(replica, replicas))
            assert torch.equal(part[0], inputs.chunk(replicas)[replica])
            assert torch.equal(part[1], labels.chunk(replicas)[replica])


def test_reading_ahead_leaves_the_sequence_where_it_stands():
    batches = Batches(noisy(), batch_size=3, seed=4)
    next(batches)
    ahead, state = batches.ahead(), batches.state_dict()
    expected = take(ahead, 7)
    assert batches.state_dict() == state
    assert take(batches, 7) == expected


def test_a_state_that_says_nothing_of_the_content_is_read():
    batches = Batches(numbered(), batch_size=3, seed=4)
    take(batches, 2)
    state = batches.state_dict()
    expected = take(batches, 3)
    # Those of before: none, and one that was made of a few samples only.
    for before in ({}, {"fingerprint": "0123456789abcdef0123456789abcdef"}):
        again = Batches(numbered(), batch_size=3, seed=4)
        again.load_state_dict({name: value for name, value in state.items() if name != "fingerprint"} | before)
        assert take(again, 3) == expected


def test_other_samples_have_another_fingerprint_and_the_same_ones_the_same():
    rows = torch.arange(200.0).reshape(100, 2)
    prints = [
        Split.of_tensors(rows, torch.zeros(100)).fingerprint(),
        Split.of_tensors(rows.clone(), torch.zeros(100)).fingerprint(),
        Split.of_tensors(rows + 1, torch.zeros(100)).fingerprint(),
        Split.of_tensors(rows, torch.ones(100)).fingerprint(),
        Split.of_tensors(rows.to(torch.int64), torch.zeros(100)).fingerprint(),
        Split.of_tensors(rows[:99], torch.zeros(99)).fingerprint(),
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


@pytest.mark.parametrize("place", [0, 1, 2500, 4999])
def test_a_single_sample_that_is_another_is_noticed(place):
    rows, labels = np.arange(5000), np.zeros(5000, dtype=np.int64)
    other, others = rows.copy(), labels.copy()
    other[place] += 1
    others[place] += 1
    images = np.zeros((5000, 3, 2, 2), dtype=np.uint8)
    brighter = images.copy()
    brighter[place, 2, 1, 1] = 1
    pairs = [
        (TokenSplit(rows, 4), TokenSplit(other, 4)),
        (TokenSplit(rows, 4), TokenSplit(rows, 5)),
        (ImageSplit(images, labels), ImageSplit(brighter, labels)),
        (ImageSplit(images, labels), ImageSplit(images, others)),
        (RowSplit(rows), RowSplit(other)),
    ]
    for one, another in pairs:
        assert one.fingerprint() != another.fingerprint()
        assert one.fingerprint() == one.fingerprint()


class RowSplit(Split):
    """One that says nothing of how it is held."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    def read_inputs(self, indices, _) -> torch.Tensor:
        return torch.from_numpy(self._rows[indices])

    def read_labels(self, indices) -> torch.Tensor:
        return torch.zeros(len(indices))


def test_pictures_are_told_by_all_their_names_and_classes(tmp_path):
    names = [f"{index}.png" for index in range(2000)]
    for name in names:
        (tmp_path / name).write_bytes(b"no picture, but nothing is decoded")
    labels = np.zeros(2000, dtype=np.int64)

    def fingerprint(names: list[str], labels: np.ndarray) -> str:
        return PictureSplit(FolderPictures(str(tmp_path), names), labels, PictureSettings()).fingerprint()

    (tmp_path / "other.png").write_bytes(b"no picture, but nothing is decoded")
    whole = fingerprint(names, labels)
    for place in (0, 999, 1999):
        assert fingerprint([*names[:place], "other.png", *names[place + 1 :]], labels) != whole
        assert fingerprint(names, np.eye(2000, dtype=np.int64)[place]) != whole
    assert fingerprint(list(names), labels.copy()) == whole


@pytest.mark.parametrize(("count", "replicas"), [(10, 1), (10, 2), (7, 3), (1, 2)])
def test_replicas_share_the_test_samples_and_the_seed_alone_chooses_them(count, replicas):
    def chosen(seed: int, num_replicas: int) -> list[int]:
        shares = [
            select_tests(
                numbered(), num_samples=count, seed=seed, batch_size=3, replica=replica, num_replicas=num_replicas
            )
            for replica in range(num_replicas)
        ]
        assert all(0 < selection.num_samples <= 3 for share in shares for selection in share)
        sizes = [sum(selection.num_samples for selection in share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        return sorted(index for share in shares for selection in share for index in selection.indices.tolist())

    found = chosen(5, replicas)
    assert len(set(found)) == count
    assert found == chosen(5, 1)
    assert count == 10 or any(chosen(seed, 1) != found for seed in range(5))  # the seed does choose
