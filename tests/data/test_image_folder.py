"""Pictures in a folder per class: which is which, their pixels, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mpc_dist.data import Batches, ImageFolderData

Image = pytest.importorskip("PIL.Image")


def write_picture(path: Path, *, value: int = 0, size: tuple[int, int] = (6, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 2 * value, 3 * value)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("bird", "cat", "dog")):
        for number in range(4):
            write_picture(tmp_path / name / f"{number}.png", value=10 * label + number)
    return tmp_path


def read_all(split, **fields):
    return next(Batches(split, batch_size=split.num_samples, seed=0, shuffle=False))


PLAIN = {"size": 4, "mean": (0.0,), "std": (1.0,)}


def test_classes_are_the_subfolders_in_name_order_and_pixels_those_of_the_files(folder):
    data = ImageFolderData(folder=str(folder), test_fraction=0.25, **PLAIN).load()
    assert (data.task.input_shape, data.task.num_outputs) == ((3, 4, 4), 3)
    assert (data.train.num_samples, data.test.num_samples) == (9, 3)
    seen = []
    for split in (data.train, data.test):
        images, labels = read_all(split)
        assert images.dtype == torch.float32
        values = (255 * images).round().to(torch.int64)
        assert torch.equal(values[:, 0, 0, 0] // 10, labels)
        for channel in range(3):
            expected = (channel + 1) * values[:, 0, :1, :1].expand(-1, 4, 4)
            assert torch.equal(values[:, channel], expected)
        seen += values[:, 0, 0, 0].tolist()
    assert sorted(seen) == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]  # each picture once


def test_the_test_share_depends_on_the_seed_alone(folder):
    def share(seed):
        data = ImageFolderData(folder=str(folder), test_fraction=0.5, seed=seed, **PLAIN).load()
        return read_all(data.test)[0]

    assert torch.equal(share(0), share(0))
    assert not torch.equal(share(0), share(1))


@pytest.mark.parametrize("name", ["test", "val", "validation"])
def test_a_test_folder_is_the_test_set(folder, name):
    for path in [*folder.iterdir()]:
        (folder / "train").mkdir(exist_ok=True)
        path.rename(folder / "train" / path.name)
    write_picture(folder / name / "dog" / "x.png", value=77)
    data = ImageFolderData(folder=str(folder), **PLAIN).load()
    images, labels = read_all(data.test)
    assert (data.train.num_samples, labels.tolist()) == (12, [2])
    assert float(images[0, 0, 0, 0]) == pytest.approx(77 / 255)
    write_picture(folder / name / "fish" / "x.png")
    with pytest.raises(ValueError, match=f"{name} has the class 'fish', which the training pictures lack"):
        ImageFolderData(folder=str(folder)).load()


def test_pictures_of_any_shape_are_scaled_cut_and_normalised(tmp_path):
    write_picture(tmp_path / "a" / "wide.png", value=20, size=(40, 10))
    write_picture(tmp_path / "b" / "tall.jpg", value=20, size=(5, 30))
    data = ImageFolderData(folder=str(tmp_path), size=8, test_fraction=0.5, mean=(0.1, 0.2, 0.3), std=(0.5,)).load()
    images, _ = read_all(data.train)
    expected = (torch.tensor([20, 40, 60]) / 255 - torch.tensor([0.1, 0.2, 0.3])) / 0.5
    # JPEG is lossy: two grey levels of 255, divided by the spread.
    torch.testing.assert_close(images.mean(dim=(0, 2, 3)), expected, atol=2 / 255 / 0.5, rtol=0)
    grey = ImageFolderData(folder=str(tmp_path), size=8, channels=1, test_fraction=0.5).load()
    assert grey.task.input_shape == (1, 8, 8)
    assert read_all(grey.train)[0].shape == (1, 1, 8, 8)


def test_augmented_pictures_are_mirrored_at_random_but_the_same_for_a_seed(tmp_path):
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[:, 0] = 255
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(20):
            Image.fromarray(picture).save(tmp_path / name / f"{number}.png")
    data = ImageFolderData(folder=str(tmp_path), augment=True, test_fraction=0.5, **PLAIN).load()
    first, again, other = (next(Batches(data.train, batch_size=20, seed=seed))[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    is_left = first[:, 0, 0, 0] == 1
    assert torch.equal(is_left, first[:, 0, 0, 3] == 0)
    assert 0 < is_left.sum() < 20
    assert (read_all(data.test)[0][:, :, :, 0] == 1).all()


def test_what_is_no_picture_or_no_folder_is_named(folder, tmp_path_factory):
    (folder / "cat" / "1.png").write_text("no picture")
    data = ImageFolderData(folder=str(folder), test_fraction=0.25, **PLAIN).load()
    with pytest.raises(ValueError, match=r"picture .*cat/1\.png cannot be read: .*; mend or remove it"):
        read_all(data.train), read_all(data.test)
    with pytest.raises(ValueError, match=r"data\.folder nowhere does not exist; give a folder with a subfolder of pic"):
        ImageFolderData(folder="nowhere").load()
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="has 0 subfolders; give one per class, two or more"):
        ImageFolderData(folder=str(empty)).load()
    for name in ("a", "b"):
        (empty / name).mkdir()
    with pytest.raises(ValueError, match=r"has no pictures in its subfolders; known endings: \.bmp"):
        ImageFolderData(folder=str(empty)).load()
    write_picture(empty / "a" / "1.png")
    with pytest.raises(ValueError, match="of its 1 samples leaves 1 for training and 0 for testing; give more data"):
        ImageFolderData(folder=str(empty)).load()
    write_picture(empty / "test" / "a" / "1.png")
    with pytest.raises(ValueError, match="has test but no train; name the training folder 'train'"):
        ImageFolderData(folder=str(empty)).load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, r"data\.size 0 is out of range"),
        ({"channels": 4}, r"data\.channels 4 is neither 3 \(colour\) nor 1 \(grey\)"),
        ({"mean": (0.1, 0.2)}, r"data\.mean has 2 values; give 1 or 3"),
        ({"std": (0.0,)}, r"data\.std \[0\.0\] has a value that is not above 0"),
        ({"test_fraction": 1.0}, r"data\.test_fraction 1\.0 is out of range"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ImageFolderData(**fields)
