"""Tables of Hugging Face's datasets: text and pictures, from every kind of file."""

import io
import json
from pathlib import Path

import pytest
import torch

from mpc_dist.data import Batches, HfImagesData, HfTextData

datasets = pytest.importorskip("datasets")
TEXTS = [f"text number {number}, with some words" for number in range(40)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def write_table(table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writers = {
        ".parquet": lambda: table.to_parquet(path),
        ".json": lambda: table.to_json(path),
        ".jsonl": lambda: table.to_json(path),
        ".arrow": lambda: write_arrow(table, path),
        "": lambda: table.save_to_disk(path),
    }
    writers[path.suffix]()


def write_arrow(table, path: Path) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.data.table.schema) as writer:
        writer.write_table(table.data.table)


def read_all(split):
    return next(Batches(split, batch_size=split.num_samples, seed=0, shuffle=False))


def texts_of(split) -> str:
    inputs, labels = read_all(split)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    return bytes(inputs.reshape(-1).tolist()).decode()


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ".json", ".jsonl", ""])
def test_the_bytes_of_every_kind_of_table_are_read_once_and_moved_by_one(tmp_path, kind):
    write_table(datasets.Dataset.from_dict({"text": TEXTS}), tmp_path / f"all{kind}")
    data = HfTextData(path=str(tmp_path / f"all{kind}"), context=10, test_fraction=0.25).load()
    assert (data.task.kind, data.task.input_shape, data.task.num_outputs) == ("tokens", (10,), 256)
    train, test = texts_of(data.train), texts_of(data.test)
    found = [text for text in f"{train}{test}".split("\0") if text in TEXTS]
    assert len(found) == len(set(found)) >= len(TEXTS) - 4  # all but those that a split's end cuts short
    assert train.split("\0")[:3] == [text for text in TEXTS if text in train.split("\0")][:3]  # in their order


def test_splits_are_told_by_the_names_of_files_and_folders(tmp_path):
    for path, word in (("train-00000-of-00002", "one"), ("train-00001-of-00002", "two"), ("validation-0", "three")):
        write_table(datasets.Dataset.from_dict({"text": [word * 20]}), tmp_path / "files" / f"{path}.parquet")
    for path, word in (("train/a", "one"), ("train/b", "two"), ("test/a", "three")):
        write_table(datasets.Dataset.from_dict({"text": [word * 20]}), tmp_path / "folders" / f"{path}.jsonl")
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": ["one" * 20, "two" * 20]}),
        test=datasets.Dataset.from_dict({"text": ["three" * 20]}),
    )
    both.save_to_disk(tmp_path / "saved")
    for name in ("files", "folders", "saved"):
        data = HfTextData(path=str(tmp_path / name), context=30).load()
        assert texts_of(data.train).startswith("one" * 20 + "\0" + "two")
        assert texts_of(data.test).startswith("three")


def test_the_test_share_depends_on_the_seed_alone(tmp_path):
    write_table(datasets.Dataset.from_dict({"text": TEXTS}), tmp_path / "all.parquet")

    def share(seed):
        return texts_of(HfTextData(path=str(tmp_path), context=10, seed=seed).load().test)

    assert share(0) == share(0) != share(1)


def test_token_ids_are_taken_as_they_are(tmp_path):
    write_table(datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 300]] * 10}), tmp_path / "ids.parquet")
    data = HfTextData(path=str(tmp_path), column="input_ids", context=4, test_fraction=0.5).load()
    assert data.task.num_outputs == 301
    ids = set(read_all(data.train)[0].reshape(-1).tolist())
    assert ids <= {5, 6, 7, 8, 300}
    write_table(datasets.Dataset.from_dict({"input_ids": [[5, -1]] * 10}), tmp_path / "ids.parquet")
    with pytest.raises(ValueError, match="has the token id -1 in column 'input_ids'; ids begin at 0"):
        HfTextData(path=str(tmp_path), column="input_ids", context=2).load()


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A tokenizer of words, saved as transformers does."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(("[END]", "[?]", "text", "number", "some", "words"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="[?]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="[END]", unk_token="[?]")
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_tokenizer_of_transformers_gives_the_ids_and_ends_each_text(tmp_path, tokenizer):
    write_table(
        datasets.Dataset.from_dict({"text": ["some text", "text number words"] * 8}), tmp_path / "d" / "a.jsonl"
    )
    data = HfTextData(path=str(tmp_path / "d"), tokenizer=str(tokenizer), context=6, test_fraction=0.5).load()
    assert data.task.num_outputs == 6
    ids = read_all(data.train)[0].reshape(-1).tolist()
    texts = " ".join(map(str, ids)).split(" 0 ")
    assert set(texts[:-1]) == {"4 2", "2 3 5"}
    with pytest.raises(
        ValueError, match=r"data\.tokenizer .*nowhere cannot be loaded .*; give a folder or hub id of one"
    ):
        HfTextData(path=str(tmp_path / "d"), tokenizer=str(tmp_path / "nowhere")).load()


def test_tables_that_cannot_serve_are_refused(tmp_path):
    def load(**fields):
        return HfTextData(path=str(tmp_path), **fields).load()

    with pytest.raises(ValueError, match=r"nowhere does not exist; give a file or folder of \.parquet, \.arrow"):
        HfTextData(path=str(tmp_path / "nowhere")).load()
    with pytest.raises(ValueError, match=r"holds no table; give files of one kind: \.parquet"):
        load()
    (tmp_path / "script.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ValueError, match="holds no table"):
        load()
    write_table(datasets.Dataset.from_dict({"words": TEXTS, "n": [*range(40)]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no column 'text'; it has words, n"):
        load()
    with pytest.raises(ValueError, match=r"column 'n' holds Value\('int64'\); data\.column must name text, or lists"):
        load(column="n")
    with pytest.raises(ValueError, match=r"too few for a data\.context of 5000 plus 1; use more text or a smaller con"):
        load(column="words", context=5000)
    with pytest.raises(ValueError, match="leaves 1 for training and 0 for testing; give more data or another fraction"):
        load(column="words", max_rows=1)
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"holds \.jsonl, \.parquet; give files of one kind"):
        load()
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "a.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"cannot be read: .*[Pp]arquet"):
        load()
    (tmp_path / "a.parquet").unlink()
    write_table(datasets.Dataset.from_dict({"text": TEXTS}), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="has the splits test but no train; name one 'train'"):
        load()
    write_table(datasets.Dataset.from_dict({"text": ["a", None]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="has an empty cell in column 'text'; remove such rows"):
        load()


def pictures(count: int) -> list:
    from PIL import Image

    return [Image.new("RGB", (6, 6), (number, 0, 0)) for number in range(count)]


@pytest.mark.parametrize("kind", [".parquet", ".arrow", ""])
def test_pictures_are_read_with_their_classes(tmp_path, kind):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b", "c", "d"]))
    table = datasets.Dataset.from_dict({"image": pictures(20), "label": [n % 3 for n in range(20)]}, features=features)
    write_table(table, tmp_path / f"all{kind}")
    path = str(tmp_path / f"all{kind}")
    data = HfImagesData(path=path, size=4, mean=(0.0,), std=(1.0,), test_fraction=0.25).load()
    assert (data.task.input_shape, data.task.num_outputs) == ((3, 4, 4), 4)
    seen = []
    for split, count in ((data.train, 15), (data.test, 5)):
        images, labels = read_all(split)
        values = (255 * images[:, 0, 0, 0]).round().long()
        assert torch.equal(values % 3, labels)
        assert len(values) == count
        seen += values.tolist()
    assert sorted(seen) == [*range(20)]


def test_pictures_as_bare_bytes_and_classes_as_words_are_read(tmp_path):
    def encode(picture) -> bytes:
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()

    table = {"photo": [encode(picture) for picture in pictures(8)], "kind": ["cat", "ant"] * 4, "other": ["x"] * 8}
    write_table(datasets.Dataset.from_dict(table), tmp_path / "train.parquet")
    write_table(datasets.Dataset.from_dict({**table, "photo": [b"no picture"] * 8}), tmp_path / "test.parquet")
    fields = {"path": str(tmp_path), "size": 4, "mean": (0.0,), "std": (1.0,), "label_column": "kind"}
    data = HfImagesData(**fields, image_column="photo").load()
    assert data.task.num_outputs == 2
    images, labels = read_all(data.train)
    assert torch.equal(1 - (255 * images[:, 0, 0, 0]).round().long() % 2, labels)  # "ant" comes first
    with pytest.raises(ValueError, match=r"picture 0 of .* cannot be read: .*; mend or remove it"):
        read_all(data.test)
    with pytest.raises(ValueError, match="has no pictures in column 'other'"):
        HfImagesData(**fields, image_column="other").load()
    with pytest.raises(ValueError, match="has no column 'image'; it has photo, kind, other"):
        HfImagesData(**fields).load()
    with pytest.raises(ValueError, match="column 'photo' holds bytes; classes are whole numbers from 0, or words"):
        HfImagesData(**{**fields, "label_column": "photo"}, image_column="photo").load()


def test_negative_classes_are_refused(tmp_path):
    table = {"image": [{"bytes": b"", "path": None}] * 4, "label": [0, 1, -1, 0]}
    write_table(datasets.Dataset.from_dict(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column 'label' holds int; classes are whole numbers from 0, or words"):
        HfImagesData(path=str(tmp_path), test_fraction=0.5).load()


def test_a_changed_file_is_read_anew(tmp_path):
    for word in ("before", "after!"):
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": word * 9}) for _ in range(4)))
        data = HfTextData(path=str(tmp_path), context=6, test_fraction=0.25).load()
        assert texts_of(data.train).startswith(word)
