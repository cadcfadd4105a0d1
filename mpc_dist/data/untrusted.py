"""Reads a pickle that nobody vouches for: arrays of plain numbers and plain containers, nothing else.

No callable of numpy or of Python is ever handed to the pickle, because even harmless ones can be misused (an object
array made from raw bytes is an array of forged pointers). Arrays are rebuilt here, from checked plain data.
"""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Little-endian or single-byte, as every known CIFAR file has them.
PLAIN_DTYPES = frozenset({"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "b1"})


def load_untrusted(path: Path, *, what: str) -> Any:
    """The content of a pickle file, or a ValueError that names the file and the reason."""
    if not path.is_file():
        raise ValueError(f"{what} {path} is missing; unpack it again from its source")
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        return _rebuild(content)
    except Exception as error:  # a corrupt pickle can raise almost anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{what} {path} cannot be read: {reason}; unpack it again from its source") from error


class _Unpickler(pickle.Unpickler):
    """Answers the few names that arrays and bytes need with methods of its own."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core", "numpy.core")
        known = {
            ("numpy", "ndarray"): "ndarray",  # only ever an argument of _reconstruct, so a word will do
            ("numpy", "dtype"): self._start_dtype,
            ("numpy.core.multiarray", "_reconstruct"): self._start_array,
            ("_codecs", "encode"): self._encode,  # how Python 3 writes bytes into protocol 2
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no array or plain container")
        return known[module, name]

    def _start_array(self, *_: object) -> "_PickledArray":
        return _PickledArray()

    def _start_dtype(self, name: object, *_: object) -> "_PickledDtype":
        return _PickledDtype(name)

    def _encode(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it encodes something other than latin1 text")
        return text.encode("latin1")


class _PickledDtype:
    """A dtype as its pickle gives it: a name, and a state that must say nothing special."""

    def __init__(self, name: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else name
        if self.name not in PLAIN_DTYPES:
            raise pickle.UnpicklingError(f"it holds an array of {self.name!r}, not of plain numbers")

    def __setstate__(self, state: object) -> None:
        # (version, byte order, subarray, field names, fields, ...)
        plain = isinstance(state, tuple) and len(state) >= 5 and all(part is None for part in state[2:5])
        if not plain or state[1] not in ("<", "|", b"<", b"|"):  # type: ignore[index]
            raise pickle.UnpicklingError("it holds an array of structured or big-endian numbers")


class _PickledArray:
    """An array as its pickle gives it, before it is rebuilt."""

    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def rebuild(self) -> NDArray[Any]:
        """The array, if its parts fit together."""
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise ValueError("it holds an array without its content")
        _, shape, dtype, is_fortran, raw = self.state
        if not isinstance(dtype, _PickledDtype) or not isinstance(raw, bytes):
            raise ValueError("it holds an array of something other than plain numbers")
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("it holds an array with an impossible shape")
        numbers = np.frombuffer(raw, dtype=np.dtype(f"<{dtype.name}"))
        if len(numbers) != math.prod(shape):
            raise ValueError(f"it holds {len(numbers)} numbers for an array of shape {shape}")
        return numbers.reshape(shape, order="F" if is_fortran else "C")


def _rebuild(content: Any) -> Any:
    """The content with its arrays rebuilt; arrays stand at the top or in a dictionary's values."""
    if isinstance(content, _PickledArray):
        return content.rebuild()
    if isinstance(content, dict):
        return {key: value.rebuild() if isinstance(value, _PickledArray) else value for key, value in content.items()}
    return content
