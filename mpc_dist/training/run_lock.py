"""One job per run folder: rank 0 holds a lock on a file in it for as long as it lives.

The kernel gives the lock back when the process ends, however it ends, so none is ever left over: a job that is started
again takes it at once. The file says who holds it; it means nothing without the lock.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from mpc_dist.new_folder import make_folders, remove_empty

LOCK_FILE = "run.lock"
PATIENCE = 10.0
"""Seconds to wait for the lock: a launcher starts ranks anew while the last of the former may still be ending."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_LOOK_EVERY = 0.1


class RunLockedError(OSError):
    """Another job is at work in the run folder."""


@contextmanager
def lock_run(folder: Path, *, rank: int = 0, patience: float = PATIENCE) -> Iterator[None]:
    """Keep other jobs out of a run folder, which is made if need be; ranks but 0 rely on rank 0.

    If what is done under the lock fails before anything is written, a folder that was made for it is removed.
    """
    if rank != 0:
        yield
        return
    made = make_folders(folder)
    try:
        descriptor = _acquire(folder / LOCK_FILE, time.monotonic() + patience)
    except BaseException:
        remove_empty(made)
        raise
    try:
        yield
    except BaseException:
        _release(folder / LOCK_FILE, descriptor)
        remove_empty(made)
        raise
    _release(folder / LOCK_FILE, descriptor)


def _acquire(path: Path, deadline: float) -> int:
    while True:
        # For writing too: over NFS, an exclusive lock needs that.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "an unnamed process"
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise RunLockedError(
                    f"{path.parent} is in use by another job ({holder}); wait for it or stop it, or give another "
                    "training.folder"
                ) from None
            time.sleep(_LOOK_EVERY)
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            _warn(f"{path.parent} cannot be locked ({error.strerror}); make sure that no other job writes there")
        if _is_still(path, descriptor):
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # a full disk is found where it matters
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # its holder has removed it meanwhile: the next one is another file


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    """Remove the file while it is still locked, so that nobody locks a name that is about to go."""
    with suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _warn(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
