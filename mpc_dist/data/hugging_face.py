"""Batches from tables that Hugging Face's datasets reads: text to predict, and pictures to classify.

Local folders only, in parquet, arrow or JSON, or as `save_to_disk` wrote them; nothing that a folder holds is executed.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpc_dist.data.dataset import MAX_SEED, Dataset, Indices
from mpc_dist.data.image_folder import TEST_NAMES, TRAIN_NAMES
from mpc_dist.data.pixels import PictureSettings, choose_test_samples
from mpc_dist.data.text import Tokens, TokenSplit, shrink_tokens
from mpc_dist.task import Task
from mpc_dist.validation import check_real, check_whole

BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json"}
ROWS_AT_ONCE = 1_000
NEEDS = "needs datasets and transformers; pip install 'mpc_dist[hf]'"


@dataclass(frozen=True)
class HfTextData:
    """Next-token prediction on a column of text, or of token ids, of a local table."""

    name: Literal["hf_text"] = "hf_text"
    """Data set."""
    path: str = "data/text"
    """A file, or a folder of them: parquet, arrow, json or jsonl, or what `save_to_disk` wrote. Those whose name or
    folder says train, test or validation are that split."""
    column: str = "text"
    """The column of texts, or of lists of token ids."""
    tokenizer: str | None = None
    """A folder or hub id of a tokenizer of transformers. Null: bytes, or the ids as they are."""
    context: int = 128
    """Tokens per sample; texts follow one another, each ended by the tokenizer's end mark (bytes: a zero)."""
    max_rows: int | None = None
    """Read at most this many rows of each split."""
    test_fraction: float = 0.1
    """Share of rows that is kept for testing if there is no test set, chosen by the seed."""
    seed: int = 0
    """What the test share is chosen by."""

    def __post_init__(self) -> None:
        check_whole("data.context", self.context, minimum=1)
        check_real("data.test_fraction", self.test_fraction, minimum=0, maximum=1)
        check_whole("data.seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.max_rows is not None:
            check_whole("data.max_rows", self.max_rows, minimum=1)

    def load(self) -> Dataset:
        """Read and tokenise all rows."""
        tables = _read_splits(Path(self.path), [self.column], self.max_rows, self.test_fraction, self.seed)
        tokenizer = None if self.tokenizer is None else _load_tokenizer(self.tokenizer)
        tokens = {name: self._tokenise(table, tokenizer) for name, table in tables.items()}
        for name, ids in tokens.items():
            if len(ids) <= self.context:
                raise ValueError(
                    f"the {name} part of {self.path} has {len(ids)} tokens, too few for a data.context of "
                    f"{self.context} plus 1; use more text or a smaller context"
                )
        largest = max(int(ids.max()) for ids in tokens.values())
        if tokenizer is not None:
            vocabulary = max(len(tokenizer), largest + 1)
        else:
            vocabulary = largest + 1 if _holds_ids(tables["train"], self.column) else 256
        train, test = (TokenSplit(ids, self.context) for ids in tokens.values())
        return Dataset(Task("tokens", (self.context,), vocabulary), train, test)

    def _tokenise(self, table: Any, tokenizer: Any) -> Tokens:
        holds_ids = _holds_ids(table, self.column)
        end = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        parts: list[Tokens] = []
        for rows in _batches_of(table, self.column):
            if any(row is None for row in rows):
                raise ValueError(f"{self.path} has an empty cell in column {self.column!r}; remove such rows")
            if not holds_ids and tokenizer is None:
                parts.append(np.frombuffer(b"".join(row.encode() + b"\0" for row in rows), dtype=np.uint8))
                continue
            if not holds_ids:
                found = tokenizer(rows, add_special_tokens=False, verbose=False)["input_ids"]
                rows = [[*row, *end] for row in found]
            ids = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64)
            if len(ids) and ids.min() < 0:
                raise ValueError(f"{self.path} has the token id {ids.min()} in column {self.column!r}; ids begin at 0")
            parts.append(shrink_tokens(ids))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)


@dataclass(frozen=True)
class HfImagesData(PictureSettings):
    """Image classification on two columns of a local table."""

    name: Literal["hf_images"] = "hf_images"
    """Data set."""
    path: str = "data/images"
    """A file, or a folder of them: parquet, arrow, json or jsonl, or what `save_to_disk` wrote. Those whose name or
    folder says train, test or validation are that split."""
    image_column: str = "image"
    """The column of pictures."""
    label_column: str = "label"
    """The column of classes: whole numbers from 0, or words."""

    def load(self) -> Dataset:
        """Read the labels; each picture is decoded when a batch needs it."""
        columns = [self.image_column, self.label_column]
        tables = _read_splits(Path(self.path), columns, None, self.test_fraction, self.seed)
        pictures = {name: self._pictures(table) for name, table in tables.items()}
        labels = {name: [*table[self.label_column]] for name, table in tables.items()}
        numbers, num_classes = _number_classes(labels, self.label_column, tables["train"].features)
        train, test = (
            self.build_split(
                TablePictures(pictures[name], self.image_column, self.path),
                numbers[name],
                augment=self.augment and name == "train",
            )
            for name in tables
        )
        return Dataset(self.build_task(num_classes), train, test)

    def _pictures(self, table: Any) -> Any:
        import datasets

        column = table.select_columns([self.image_column])
        feature = column.features[self.image_column]
        if not isinstance(feature, datasets.Image):
            # Other tools keep pictures in a parquet file as their bytes.
            is_bytes = isinstance(feature, dict) and "bytes" in feature
            if not is_bytes and getattr(feature, "dtype", None) != "binary":
                raise ValueError(
                    f"{self.path} has no pictures in column {self.image_column!r} but {feature}; name the column of "
                    "pictures by data.image_column"
                )
        return column.cast_column(self.image_column, datasets.Image(decode=False))


@dataclass(frozen=True)
class TablePictures:
    """Pictures in a column of a table."""

    table: Any
    column: str
    path: str
    """Where the table is."""
    names: Sequence[str] = ()
    """Rows have none."""

    def open(self, index: int) -> Any:
        """The picture, decoded."""
        import io

        from PIL import Image

        cell = self.table[index][self.column]
        try:
            source = io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"]
            with Image.open(source) as picture:
                picture.load()
                return picture
        except Exception as error:  # PIL raises many types for what is no picture
            raise ValueError(f"picture {index} of {self.path} cannot be read: {error}; mend or remove it") from error

    def read_raw(self, index: int) -> bytes:
        """The picture's file, or the bytes in the cell."""
        cell = self.table[index][self.column]
        try:
            content: bytes = cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()
        except (OSError, TypeError) as error:  # no file, or not even a path
            raise ValueError(f"picture {index} of {self.path} cannot be read: {error}; mend or remove it") from error
        return content


def _read_splits(
    path: Path, columns: Sequence[str], max_rows: int | None, test_fraction: float, seed: int
) -> dict[str, Any]:
    """The tables `train` and `test`, in that order, with these columns at least."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"data 'hf_text' and 'hf_images' {NEEDS}") from error
    if not path.exists():
        raise ValueError(f"data.path {path} does not exist; give a file or folder of {', '.join(BUILDERS)}")
    files = _list_tables(path)
    try:
        found = _load(datasets, path, files)
    except Exception as error:  # datasets and pyarrow raise many types for a file that is no table
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"data.path {path} cannot be read: {reason}; write it again") from error
    train = next((found[name] for name in TRAIN_NAMES if name in found), None)
    test = next((found[name] for name in TEST_NAMES if name in found), None)
    if train is None:
        raise ValueError(f"data.path {path} has the splits {', '.join(found)} but no train; name one 'train'")
    for table in (train, test):
        for column in columns:
            if table is not None and column not in table.column_names:
                raise ValueError(f"data.path {path} has no column {column!r}; it has {', '.join(table.column_names)}")
    if max_rows is not None:
        train = train.select(range(min(max_rows, len(train))))
        test = None if test is None else test.select(range(min(max_rows, len(test))))
    if test is not None:
        return {"train": train, "test": test}
    first, second = choose_test_samples(len(train), test_fraction, seed, what=f"data.path {path}")
    return {"train": train.select(first), "test": train.select(second)}


def _list_tables(path: Path) -> list[Path]:
    """The files of one kind in a folder; none if `save_to_disk` wrote it."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return []
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in BUILDERS)
    kinds = sorted({file.suffix for file in files})
    if len({BUILDERS.get(kind) for kind in kinds}) != 1 or kinds[0] not in BUILDERS:
        held = f"holds {', '.join(kinds)}" if kinds else "holds no table"
        raise ValueError(f"data.path {path} {held}; give files of one kind: {', '.join(BUILDERS)}")
    return files


def _load(datasets: Any, path: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Every split by its name; one without a name is `train`."""
    if not files:
        saved = datasets.load_from_disk(path)
        return dict(saved) if isinstance(saved, dict) else {"train": saved}
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(_split_of(file, path), []).append(str(file))
    builder = BUILDERS[files[0].suffix]
    # One at a time: the splits' features need not agree in columns that nobody asked for.
    return {name: datasets.load_dataset(builder, data_files={name: own}, split=name) for name, own in splits.items()}


def _split_of(file: Path, top: Path) -> str:
    """The split that a file's name or one of its folders says."""
    inside = [*file.relative_to(top).parent.parts] if top.is_dir() else []
    words = [*inside, *file.stem.replace("_", "-").replace(".", "-").split("-")]
    return next((word for word in words if word in (*TRAIN_NAMES, *TEST_NAMES)), TRAIN_NAMES[0])


def _batches_of(table: Any, column: str) -> Iterator[list[Any]]:
    narrow = table.select_columns([column])
    for start in range(0, len(narrow), ROWS_AT_ONCE):
        yield narrow[start : start + ROWS_AT_ONCE][column]


def _holds_ids(table: Any, column: str) -> bool:
    """Whether the column holds lists of whole numbers; raises if it holds no text either."""
    feature = table.features[column]
    inner = getattr(feature, "feature", None)
    if str(getattr(inner, "dtype", "")).startswith(("int", "uint")):
        return True
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"column {column!r} holds {feature}; data.column must name text, or lists of token ids")
    return False


def _load_tokenizer(path: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"data.tokenizer {NEEDS}") from error
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many types for what is no tokenizer
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"data.tokenizer {path} cannot be loaded ({reason}); give a folder or hub id of one"
        ) from error


def _number_classes(labels: dict[str, list[Any]], column: str, features: Any) -> tuple[dict[str, Indices], int]:
    """The labels as whole numbers from 0, and how many classes there are."""
    flat = [label for values in labels.values() for label in values]
    kinds = {type(label) for label in flat}
    if kinds == {str}:
        numbers = {word: number for number, word in enumerate(sorted(set(flat)))}
        return {name: np.array([numbers[word] for word in values]) for name, values in labels.items()}, len(numbers)
    if kinds != {int} or min(flat) < 0:
        said = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"column {column!r} holds {said or 'nothing'}; classes are whole numbers from 0, or words")
    named = getattr(features[column], "num_classes", None)
    return {name: np.array(values, dtype=np.int64) for name, values in labels.items()}, named or max(flat) + 1
