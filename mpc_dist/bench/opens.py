"""Counts how often the files of a folder are opened, by whatever process, as the kernel tells it (Linux)."""

import contextlib
import ctypes
import os
import struct
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

_IN_OPEN, _IN_CLOSE, _IN_ISDIR, _IN_Q_OVERFLOW = 0x20, 0x18, 0x40000000, 0x4000
_HEADER = struct.Struct("iIII")
_READ_BYTES = 1 << 20
_PERIOD = 0.001


class Opens:
    """As a context: watches the folder, not those below it. `count` may be asked afterwards.

    The kernel makes one of two equal events that nobody has read: two opens of a file within a millisecond, the first
    not closed yet, may count as one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.count: Counter[str] = Counter()
        """Opens by the file's name."""

    def __enter__(self) -> "Opens":
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        events = _IN_OPEN | _IN_CLOSE
        if self._descriptor < 0 or libc.inotify_add_watch(self._descriptor, os.fsencode(self._folder), events) < 0:
            raise OSError(ctypes.get_errno(), f"{self._folder} cannot be watched")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opens", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._take()
        os.close(self._descriptor)

    def _watch(self) -> None:
        while not self._ends.wait(_PERIOD):
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._descriptor, _READ_BYTES):
                self._note(content)

    def _note(self, content: bytes) -> None:
        place = 0
        while place < len(content):
            _, mask, _, length = _HEADER.unpack_from(content, place)
            place += _HEADER.size
            name = content[place : place + length].rstrip(b"\0").decode()
            place += length
            if mask & _IN_Q_OVERFLOW:
                raise OSError(f"more opens in {self._folder} than the kernel kept; watch fewer at a time")
            if mask & _IN_OPEN and not mask & _IN_ISDIR:
                self.count[name] += 1
