"""The tensors of a checkpoint in several safetensors files: which holds what, and reading only those that are needed.

A tensor of which several ranks hold a part each is kept as these parts, under names that say where they belong.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mpc_dist.runtime.state import read_fragment_name
from mpc_dist.validation import MAX_COUNT, check_whole

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """What a file holds under one name."""

    type: str
    """As safetensors calls it."""
    shape: tuple[int, ...]

    def describe(self) -> Tensor:
        """An empty tensor like it."""
        if self.type not in _TYPES:
            raise ValueError(f"unknown type of tensor {self.type!r}; known: {', '.join(_TYPES)}")
        for size in self.shape:
            check_whole("a tensor's size", size, minimum=0, maximum=MAX_COUNT)
        return torch.empty(self.shape, dtype=_TYPES[self.type], device="meta")


Index = Mapping[str, Mapping[str, Entry]]
"""By file: what it holds, by name."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Write a file, and be sure that it is on disk; what it holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(save(dict(tensors)))
        file.flush()
        os.fsync(file.fileno())
    return {name: Entry(_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def read_index(folder: Path, files: Iterable[str]) -> dict[str, dict[str, Entry]]:
    """What these files say that they hold; opens each."""
    found: dict[str, dict[str, Entry]] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
            found[name] = {key: Entry(one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()}
    return found


class TensorFiles:
    """The tensors of several files, by name."""

    def __init__(self, folder: Path, index: Index, sizes: Mapping[str, int]) -> None:
        """`sizes` are the files', in bytes: who reads makes room for what the index says, so it must be true."""
        self._folder = folder
        for file, held in index.items():
            if sum(entry.describe().nbytes for entry in held.values()) > sizes[file]:
                raise OSError(f"{file} is too small to hold what the index says")
        self._entries = {(file, key): entry for file, held in index.items() for key, entry in held.items()}
        self._parts: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
        """Of each tensor: (file, name there, first element, or None if it is the whole tensor)."""
        self.described: dict[str, Tensor] = {}
        """Every tensor there is, with an empty one of its shape and type."""
        for (file, key), entry in self._entries.items():
            fragment = read_fragment_name(key)
            name, first, shape = (key, None, entry.shape) if fragment is None else fragment
            self._parts[name].append((file, key, first))
            self.described[name] = Entry(entry.type, shape).describe()
        for name in self.described:
            self._check_whole(name)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Copy the tensors of these names into place; only the files that hold them are opened."""
        wanted: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
        for name in into:
            for file, key, first in self._parts[name]:
                wanted[file].append((name, key, first))
        for file, parts in wanted.items():
            with safe_open(self._folder / file, framework="pt") as opened:
                for name, key, first in parts:
                    self._put(into[name], opened.get_tensor(key), file, key, first)

    def _put(self, target: Tensor, found: Tensor, file: str, key: str, first: int | None) -> None:
        entry = self._entries[file, key]
        if tuple(found.shape) != entry.shape or found.dtype != _TYPES[entry.type]:
            raise OSError(f"{file} holds {key} as {found.dtype} of {tuple(found.shape)}, not as was written")
        if first is None:
            target.copy_(found)
        else:
            assert target.is_contiguous()
            target.view(-1)[first : first + found.numel()].copy_(found)

    def _check_whole(self, name: str) -> None:
        """Raise unless the parts of a tensor follow one another from its first element to its last."""
        parts = self._parts[name]
        spans = sorted((first or 0, self._entries[file, key].describe().numel()) for file, key, first in parts)
        ends = [first + size for first, size in spans]
        if [first for first, _ in spans] != [0, *ends[:-1]] or ends[-1] != self.described[name].numel():
            raise OSError(f"{name} is not there as a whole: (first element, number of elements) are {spans}")


def describe_problem(error: BaseException) -> str:
    """In one line, what went wrong."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


UNREADABLE = (SafetensorError, OSError, ValueError, TypeError, KeyError, IndexError, RuntimeError)
"""What reading a file raises that is not what was written."""
