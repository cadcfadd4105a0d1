"""Text as tokens."""

import itertools
import time
from pathlib import Path

import pytest
import torch

from mpc_dist.data import Batches, TextData
from mpc_dist.data.text import TokenSplit


def load_text(tmp_path: Path, content: bytes, **settings):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return TextData(path=str(path), **settings).load()


def test_labels_are_the_next_tokens(tmp_path: Path):
    data = load_text(tmp_path, bytes(range(100)), context=8)
    assert data.task.num_outputs == 256
    for inputs, labels in itertools.islice(Batches(data.train, batch_size=2, seed=0), 5):
        assert inputs.shape == (2, 8)
        assert torch.equal(labels, inputs + 1)


def test_an_epoch_reads_every_token_once_and_the_end_is_for_testing(tmp_path: Path):
    data = load_text(tmp_path, bytes(range(101)), context=10, test_fraction=0.3)
    assert (data.train.num_samples, data.test.num_samples) == (7, 2)
    train, _ = next(Batches(data.train, batch_size=7, seed=0))
    test, _ = next(Batches(data.test, batch_size=2, seed=0, shuffle=False))
    assert sorted(train.flatten().tolist()) == list(range(70))
    assert test.flatten().tolist() == list(range(71, 91))


def test_characters_get_a_vocabulary_of_those_that_occur(tmp_path: Path):
    data = load_text(tmp_path, "añ😀".encode() * 20, unit="characters", context=5)
    assert data.task.num_outputs == 3
    inputs, _ = next(Batches(data.train, batch_size=1, seed=0, shuffle=False))
    assert inputs.tolist() == [[0, 1, 2, 0, 1]]


def test_characters_cut_at_max_bytes_are_dropped_but_other_damage_is_named(tmp_path: Path):
    assert load_text(tmp_path, "é".encode() * 40, unit="characters", context=2, max_bytes=61).task.num_outputs == 1
    with pytest.raises(ValueError, match=r"not UTF-8 at byte 50; use data\.unit 'bytes'"):
        load_text(tmp_path, b"a" * 50 + b"\xff", unit="characters", context=2)
    with pytest.raises(ValueError, match=r"not UTF-8 at byte 3; use data\.unit 'bytes'"):
        load_text(tmp_path, b"abc\xff" + b"d" * 50, unit="characters", context=2)


def test_a_folder_is_read_in_name_order(tmp_path: Path):
    for name, letter in (("b.txt", b"b"), ("a/z.txt", b"a"), ("c", b"c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(letter * 10)
    data = TextData(path=str(tmp_path), context=29, test_fraction=0.0)
    with pytest.raises(ValueError, match=r"the test part .* has 0 bytes"):
        data.load()
    data = TextData(path=str(tmp_path), context=4, test_fraction=0.2).load()
    inputs, _ = next(Batches(data.train, batch_size=5, seed=0, shuffle=False))
    assert bytes(inputs.flatten().tolist()) == b"aaaaaaaaaabbbbbbbbbb"


def test_without_a_path_the_standard_library_is_read():
    data = TextData(max_bytes=200_000, context=64).load()
    assert data.train.num_samples == (180_000 - 1) // 64
    inputs, _ = next(Batches(data.train, batch_size=100, seed=0))
    assert b"self" in bytes(inputs.flatten().tolist())


def test_real_text_is_read(real_data: Path):
    data = TextData(path=str(real_data / "text" / "tinyshakespeare.txt"), unit="characters").load()
    assert data.task.num_outputs == 65


def test_bad_settings_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data\.path .*none does not exist; give a text file or a folder"):
        TextData(path=str(tmp_path / "none")).load()
    with pytest.raises(ValueError, match="is a folder without files"):
        TextData(path=str(tmp_path)).load()
    with pytest.raises(ValueError, match=r"training part of .* has 9 bytes, too few for a data\.context of 128 plus 1"):
        load_text(tmp_path, b"too short.")
    with pytest.raises(ValueError, match=r"data\.context 0 is out of range"):
        TextData(context=0)
    with pytest.raises(ValueError, match=r"data\.test_fraction 1\.5 is out of range"):
        TextData(test_fraction=1.5)
    with pytest.raises(ValueError, match=r"data\.max_bytes 0 is out of range"):
        TextData(max_bytes=0)


def test_many_files_are_read_in_linear_time(tmp_path: Path):
    """Were each joined to all before it, these 2,000 would take half a minute."""
    for number in range(2_000):
        (tmp_path / f"{number:04}.txt").write_bytes(b"%019d\n" % number * 1_000)
    start = time.process_time()
    data = TextData(path=str(tmp_path)).load()
    assert time.process_time() - start < 5
    assert data.train.num_samples == (36_000_000 - 1) // 128


def test_a_limit_bounds_what_is_read_of_a_file_of_any_size(tmp_path: Path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 42)  # takes no space
    data = TextData(path=str(tmp_path), max_bytes=10_000).load()
    assert data.train.num_samples == (9_000 - 1) // 128
    with pytest.raises(ValueError, match=r"the text would take 4 TiB, but there are .*; set data\.max_bytes"):
        TextData(path=str(tmp_path)).load()


def test_a_token_takes_no_more_memory_than_it_needs(tmp_path: Path):
    """The standard case, bytes, is as large in memory as on disk."""
    for unit, size in (("bytes", 1), ("characters", 1)):
        split = load_text(tmp_path, b"abcd" * 100, unit=unit, context=4).train
        assert isinstance(split, TokenSplit)
        assert split.tokens.itemsize == size
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    split = load_text(tmp_path, many.encode() * 3, unit="characters", context=4).train
    assert isinstance(split, TokenSplit)
    assert split.tokens.itemsize == 2
    inputs, _ = next(Batches(split, batch_size=1, seed=0, shuffle=False))
    assert inputs.dtype == torch.int64
