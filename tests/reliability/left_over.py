"""What a job leaves behind on its machine: processes, shared memory, temporary files.

Jobs get a temporary folder of their own, and a mark in their environment by which their processes are known, whoever
has become their parent. Others may use the machine meanwhile.
"""

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from tests.reliability.agent import PRELOADED

MARK = "MPC_DIST_SOAK"
SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 5.0
"""Seconds in which what ends may still be there."""


@dataclass(frozen=True)
class Seen:
    """What there is at a time, by name."""

    processes: frozenset[str]
    shared: frozenset[str]
    temporary: frozenset[str]

    def beyond(self, other: "Seen") -> list[str]:
        """What there is that was not there before."""
        pairs = {
            "process": (self.processes, other.processes),
            "shared memory": (self.shared, other.shared),
            "temporary file": (self.temporary, other.temporary),
        }
        return [f"{kind} {name}" for kind, (now, before) in pairs.items() for name in sorted(now - before)]


class Surroundings:
    """Where jobs run: what they leave can be told."""

    def __init__(self, temporary: Path, mark: str) -> None:
        self._temporary = temporary
        self._mark = f"{MARK}={mark}".encode()

    def look(self) -> Seen:
        """All there is now; of shared memory, what no process holds: others may use the machine, too."""
        held = _held_memory()
        shared = {path.name for path in SHARED_MEMORY.glob("*") if _inode(path) not in held}
        temporary = {str(path.relative_to(self._temporary)) for path in self._temporary.rglob("*")}
        return Seen(frozenset(self._processes()), frozenset(shared), frozenset(temporary))

    @contextmanager
    def expect_nothing_left(self) -> Iterator[None]:
        """Raise if the work inside leaves anything, after a while in which it may go."""
        before = self.look()
        yield
        deadline = time.monotonic() + PATIENCE
        left = set(self.look().beyond(before))
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left &= set(self.look().beyond(before))
        assert not left, f"left behind: {'; '.join(sorted(left))}"

    def _processes(self) -> Iterator[str]:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and self._mark in _read(folder / "environ").split(b"\0"):
                command = _read(folder / "cmdline").replace(b"\0", b" ")[:80].decode(errors="replace")
                yield f"{folder.name} ({command})"


@contextmanager
def surround(folder: Path) -> Iterator[Surroundings]:
    """Let all jobs that this process starts run in a temporary folder below `folder`, marked."""
    temporary, mark = folder / "tmp", uuid.uuid4().hex
    temporary.mkdir()
    # By default every core adds 8 heaps, and each save's thread gets another one: until all have been used, a process
    # grows that keeps nothing.
    os.environ |= {"TMPDIR": str(temporary), MARK: mark, "MALLOC_ARENA_MAX": "1"}
    # torch keeps one per user, by default among the temporary files; jobs share it.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    tempfile.tempdir = None
    # The server from which ranks are forked stays, and so does its folder; it must not be there yet.
    assert forkserver._forkserver._forkserver_pid is None, "jobs ran before"  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    yield Surroundings(temporary, mark)


def _held_memory() -> set[int]:
    """The inodes of shared memory that some process has mapped; its name there may be an earlier one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        lines = _read(path).decode(errors="replace").splitlines()
        found |= {int(line.split()[4]) for line in lines if f"{SHARED_MEMORY}/" in line}
    return found


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
