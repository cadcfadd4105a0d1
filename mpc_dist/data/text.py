"""Next-token prediction on the bytes or characters of any text; without a path, of Python's standard library."""

import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpc_dist.data.dataset import Dataset, Indices, Noise, Split, view_bytes
from mpc_dist.task import Task
from mpc_dist.validation import check_memory, check_real, check_whole

Tokens = NDArray[np.unsignedinteger[Any]]
"""Token ids, in as few bytes each as they need."""


@dataclass(frozen=True)
class TextData:
    """Chunks of a text; the labels are the inputs moved by one token. The end of the text is the test set."""

    name: Literal["text"] = "text"
    """Data set."""
    path: str | None = None
    """A file, or a folder whose files are joined in name order. None: the sources of Python's standard library, which
    every machine has (they differ between Python versions)."""
    unit: Literal["bytes", "characters"] = "bytes"
    """What a token is; characters need UTF-8, and the vocabulary is those that occur."""
    context: int = 128
    """Tokens per sample."""
    test_fraction: float = 0.1
    """Share of the text, from its end, that is kept for testing."""
    max_bytes: int | None = None
    """Read at most this many bytes of text."""

    def __post_init__(self) -> None:
        check_whole("data.context", self.context, minimum=1)
        check_real("data.test_fraction", self.test_fraction, minimum=0, maximum=1)
        if self.max_bytes is not None:
            check_whole("data.max_bytes", self.max_bytes, minimum=1)

    def load(self) -> Dataset:
        """Read the text and cut it into training and test chunks."""
        raw, is_cut = _read(self._files(), self.max_bytes)
        tokens, vocabulary = _tokenise(raw, self.unit, is_cut=is_cut)
        cut = round(len(tokens) * (1 - self.test_fraction))
        parts = {"training": tokens[:cut], "test": tokens[cut:]}
        for part, part_tokens in parts.items():
            if len(part_tokens) <= self.context:
                raise ValueError(
                    f"the {part} part of {self.path or 'the text'} has {len(part_tokens)} {self.unit}, too few for a "
                    f"data.context of {self.context} plus 1; use more text, a smaller context or another test_fraction"
                )
        train, test = (TokenSplit(part_tokens, self.context) for part_tokens in parts.values())
        return Dataset(Task("tokens", (self.context,), vocabulary), train, test)

    def _files(self) -> list[Path]:
        if self.path is None:
            # Top level only: packages below it (tests, idlelib, installed packages) vary between machines.
            return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        path = Path(self.path)
        if not path.exists():
            raise ValueError(f"data.path {path} does not exist; give a text file or a folder of them")
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            raise ValueError(f"data.path {path} is a folder without files; give a text file or a folder of them")
        return files


def _read(files: Sequence[Path], max_bytes: int | None) -> tuple[bytearray, bool]:
    """The files' bytes, one after another, up to the limit; and whether the limit cut them."""
    check_memory(
        "the text", sum(file.stat().st_size for file in files) if max_bytes is None else 0, "set data.max_bytes"
    )
    raw = bytearray()  # grows in place: joined bytes would be copied for every file
    for path in files:
        with path.open("rb") as file:
            # One more than may be kept tells whether there was more.
            raw += file.read() if max_bytes is None else file.read(max_bytes + 1 - len(raw))
        if max_bytes is not None and len(raw) > max_bytes:
            del raw[max_bytes:]
            return raw, True
    return raw, False


def _tokenise(raw: bytearray, unit: Literal["bytes", "characters"], *, is_cut: bool) -> tuple[Tokens, int]:
    """Token ids and the size of the vocabulary."""
    if unit == "bytes":
        return np.frombuffer(raw, dtype=np.uint8), 256
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # A cut at max_bytes may split the last character, which is then dropped; other damage is not.
        if not is_cut or error.reason != "unexpected end of data":
            raise ValueError(f"the text is not UTF-8 at byte {error.start}; use data.unit 'bytes'") from error
        text = raw[: error.start].decode("utf-8")
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    occurs = np.zeros(sys.maxunicode + 1, dtype=bool)
    occurs[codes] = True
    ids = shrink_tokens(np.cumsum(occurs) - 1)  # of every character, its place among those that occur
    return ids[codes], max(int(occurs.sum()), 1)


def shrink_tokens(ids: NDArray[np.int64]) -> Tokens:
    """The same numbers in the fewest bytes each: text in memory should not be eight times its file."""
    largest = int(ids.max(initial=0))
    return ids.astype(np.min_scalar_type(largest))


@dataclass(frozen=True)
class TokenSplit(Split):
    """Non-overlapping chunks of a text: an epoch reads every token once."""

    tokens: Tokens
    context: int

    @property
    def num_samples(self) -> int:
        """How many whole chunks there are, with a token after each."""
        return (len(self.tokens) - 1) // self.context

    def read_inputs(self, indices: Indices, _: Noise) -> Tensor:
        """These chunks."""
        return self._read(indices, 0)

    def read_labels(self, indices: Indices) -> Tensor:
        """The chunks that begin one token later."""
        return self._read(indices, 1)

    def read_raw(self, _: Indices) -> Iterator[bytes | memoryview]:
        """The whole text."""
        yield f"{self.tokens.dtype} {self.context}".encode()
        yield view_bytes(self.tokens)

    def _read(self, indices: Indices, shift: int) -> Tensor:
        places = (indices * self.context)[:, None] + np.arange(shift, self.context + shift)
        return torch.from_numpy(self.tokens[places].astype(np.int64))
