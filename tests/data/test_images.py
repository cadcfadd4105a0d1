"""Digits and CIFAR; CIFAR files are untrusted."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mpc_dist.data import Batches, Cifar10Data, Cifar100Data, DigitsData
from mpc_dist.data.images import MEAN, STD


def write_file(
    path: Path, *, count: int = 6, label_key: bytes = b"labels", protocol: int = 2, **changes: object
) -> None:
    rng = np.random.default_rng(len(path.name))
    content = {b"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), label_key: [i % 10 for i in range(count)]}
    for name, value in changes.items():
        content[name.encode()] = value
    path.write_bytes(pickle.dumps(content, protocol=protocol))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        write_file(tmp_path / name)
    return tmp_path


def load(folder: Path) -> None:
    Cifar10Data(folder=str(folder), num_train_files=2).load()


def test_training_files_are_joined_and_images_normalised(folder: Path):
    data = Cifar10Data(folder=str(folder), num_train_files=2).load()
    assert data.task.input_shape == (3, 32, 32)
    assert (data.train.num_samples, data.test.num_samples) == (12, 6)
    images, labels = next(Batches(data.train, batch_size=12, seed=0, shuffle=False))
    raw = pickle.loads((folder / "data_batch_2").read_bytes(), encoding="bytes")
    pixels = torch.from_numpy(raw[b"data"][3].reshape(3, 32, 32)) / 255
    expected = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(images[9], expected)
    assert labels[9] == 3


def test_real_subsets_are_read(cifar: Path):
    ten = Cifar10Data(folder=str(cifar / "cifar-10-batches-py"), num_train_files=1).load()
    hundred = Cifar100Data(folder=str(cifar / "cifar-100-python")).load()
    for data, classes in ((ten, 10), (hundred, 100)):
        assert (data.train.num_samples, data.test.num_samples) == (10_000, 2_000)
        _, labels = next(Batches(data.train, batch_size=10_000, seed=0))
        assert labels.bincount().tolist() == [10_000 // classes] * classes


def test_files_written_by_python_2_are_read(folder: Path):
    """The official files name numpy's internals as numpy.core."""
    path = folder / "data_batch_1"
    old = path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in old
    path.write_bytes(old)
    assert Cifar10Data(folder=str(folder), num_train_files=2).load().train.num_samples == 12


def test_augmentation_shifts_and_mirrors_training_images_only(folder: Path):
    plain, augmented = (
        Cifar10Data(folder=str(folder), num_train_files=2, augment=augment).load() for augment in (False, True)
    )
    batches = [next(Batches(d.train, batch_size=12, seed=0))[0] for d in (plain, augmented, augmented)]
    assert not torch.equal(batches[0], batches[1])
    assert torch.equal(batches[1], batches[2])
    tests = [next(Batches(d.test, batch_size=6, seed=0))[0] for d in (plain, augmented)]
    assert torch.equal(*tests)
    # Each augmented image is a crop of its padded original or of the mirrored one; both kinds and real shifts occur.
    kinds: list[tuple[int, int, bool]] = []
    black = (torch.zeros(3, 1, 1) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    for before, after in zip(batches[0], batches[1], strict=True):
        padded = black.expand(3, 40, 40).clone()
        padded[:, 4:36, 4:36] = before
        found = [
            (i, j, mirrored)
            for i in range(9)
            for j in range(9)
            for mirrored in (False, True)
            if torch.allclose(after.flip(-1) if mirrored else after, padded[:, i : i + 32, j : j + 32])
        ]
        assert len(found) == 1
        kinds += found
    assert {mirrored for _, _, mirrored in kinds} == {False, True}
    assert len({(i, j) for i, j, _ in kinds}) > 3


def test_a_missing_folder_or_file_is_named(tmp_path: Path, folder: Path):
    with pytest.raises(ValueError, match=r"data\.folder .*nowhere does not exist; unpack the python version"):
        load(tmp_path / "nowhere")
    (folder / "test_batch").unlink()
    with pytest.raises(ValueError, match=r"CIFAR file .*test_batch is missing; unpack"):
        load(folder)


def test_a_missing_training_file_is_an_error_unless_a_subset_is_asked_for(folder: Path):
    with pytest.raises(ValueError, match=r"data_batch_3 is missing; .*set data\.num_train_files for a subset"):
        Cifar10Data(folder=str(folder)).load()
    assert Cifar10Data(folder=str(folder), num_train_files=1).load().train.num_samples == 6
    with pytest.raises(ValueError, match=r"data\.num_train_files 6 is out of range; use 1\.\.5"):
        Cifar10Data(num_train_files=6)


@pytest.mark.parametrize("kept", [0, 1, 10, 0.5, 0.999])
def test_a_truncated_file_is_named(folder: Path, kept):
    path = folder / "data_batch_2"
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(ValueError, match=r"CIFAR file .*data_batch_2 cannot be read: .*; unpack it again"):
        load(folder)


class RunsACommand:
    def __reduce__(self):
        return os.system, (f"{sys.executable} -c \"open('pwned', 'w')\"",)


class Harmless:
    """An ordinary object: still neither an array nor a plain container."""


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (RunsACommand(), "posix.system"),
        (Harmless(), "Harmless"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0], b"extra": RunsACommand()}, "posix.system"),
        (np.random.default_rng, "numpy.random"),
        (eval, "eval"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_with_anything_but_arrays_is_refused_and_runs_nothing(
    folder: Path, content, refused, protocol, monkeypatch
):
    monkeypatch.chdir(folder)
    (folder / "test_batch").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(ValueError, match=rf"test_batch cannot be read: it refers to .*{refused}.*no array or plain"):
        load(folder)
    assert not (folder / "pwned").exists()


class ForgedArray:
    """Pickles as numpy callables and a state of the attacker's choice."""

    def __init__(self, make, arguments, state=None):
        self.parts = (make, arguments) if state is None else (make, arguments, state)

    def __reduce__(self):
        return self.parts


def forged_dtype(*state: object) -> ForgedArray:
    return ForgedArray(np.dtype, ("u1", False, True), state)


def forged_state(*state: object) -> ForgedArray:
    return ForgedArray(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), state)


PLAIN_STATE = (3, "|", None, None, None, -1, -1, 0)
POINTERS = b"\x41" * 16


FORGERIES = [
    ForgedArray(np.ndarray, ((2,), "O", POINTERS)),
    forged_state(1, (2,), np.dtype("O"), False, POINTERS),
    forged_state(1, (2,), forged_dtype(3, "|", None, ("a",), {}, 1, 1, 0), False, b"ab"),
    forged_state(1, (2,), forged_dtype(3, "|", (np.dtype("O"), (2,)), None, None, 16, 8, 0), False, POINTERS),
    forged_state(1, (10**12,), forged_dtype(*PLAIN_STATE), False, b"ab"),
    forged_state(1, (-2,), forged_dtype(*PLAIN_STATE), False, b"ab"),
    forged_state(1, (2,), "O", False, POINTERS),
    forged_state(1),
    ForgedArray(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b")),
]
READ_ALL = """
import sys, pathlib
from mpc_dist.data.images import read_cifar_file
for path in sys.argv[1:]:
    try:
        read_cifar_file(pathlib.Path(path), b"labels", 10)
    except ValueError as error:
        assert str(error).startswith("CIFAR file"), error
        print("refused", pathlib.Path(path).name, flush=True)
"""


def test_forged_arrays_neither_crash_nor_load(tmp_path: Path):
    """In a process of its own: what this guards against is a crash of the interpreter."""
    paths = []
    for key in ("data", "labels"):
        for number, forged in enumerate(FORGERIES):
            paths.append(tmp_path / f"{key}_{number}")
            write_file(paths[-1], protocol=4, **{key: forged})
    done = subprocess.run([sys.executable, "-c", READ_ALL, *paths], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:-1] == [f"refused {path.name}" for path in paths], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": [1, 2]}, r"holds images as list; expected uint8 \(N, 3072\)"),
        ({"data": np.zeros((6, 3072))}, r"holds images as float64 \(6, 3072\)"),
        ({"data": np.zeros((6, 100), np.uint8)}, r"holds images as uint8 \(6, 100\)"),
        ({"labels": [1, 2]}, "holds 6 images but 2 labels"),
        ({"labels": ["1"] * 6}, "labels that are not a list of whole numbers"),
        ({"labels": [1.9] * 6}, "labels that are not a list of whole numbers"),
        ({"labels": [True] * 6}, "labels that are not a list of whole numbers"),
        ({"labels": 3}, "labels that are not a list of whole numbers"),
        ({"labels": [0, 1, 2, 3, 4, 10]}, r"has labels 0\.\.10; expected 0\.\.9"),
        ({"labels": [-1, 1, 2, 3, 4, 5]}, r"has labels -1\.\.5"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "holds 0 images"),
    ],
)
def test_a_file_with_the_wrong_content_is_named(folder: Path, changes, message):
    write_file(folder / "data_batch_1", protocol=4, **changes)
    with pytest.raises(ValueError, match=rf"data_batch_1 .*{message}"):
        load(folder)


def test_the_other_cifars_files_are_recognised(folder: Path):
    write_file(folder / "data_batch_1", label_key=b"fine_labels")
    with pytest.raises(ValueError, match="lacks 'data' or 'labels'; is it of the other CIFAR"):
        load(folder)


def test_digits_are_images_of_ten_classes():
    pytest.importorskip("sklearn")
    data = DigitsData(num_test=300).load()
    assert (data.train.num_samples, data.test.num_samples) == (1497, 300)
    images, labels = next(Batches(data.train, batch_size=1497, seed=0))
    assert images.shape == (1497, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert set(labels.tolist()) == set(range(10))
    with pytest.raises(ValueError, match=r"data\.num_test 1797 is out of range; use 1\.\.1796"):
        DigitsData(num_test=1797)
