"""Starts multiprocessing's fork server by a fork instead of a new interpreter, which would import torch again.

The fork is made before any test has run, so what ranks inherit is what a new interpreter would import.
"""

import json
import multiprocessing.util
import os
import signal
import socket
import sys
from collections.abc import Sequence

_MOST_BYTES = 1 << 20


def fork_ranks_from_here() -> None:
    """From now on the first fork server of this process is a fork of it as it is now."""
    near, far = socket.socketpair()
    process = os.fork()
    if process == 0:
        near.close()
        _become_fork_server(far)
    far.close()
    start_anew = multiprocessing.util.spawnv_passfds
    waiting = [process]

    def start(path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
        command = arguments[-1]
        if waiting and "multiprocessing.forkserver" in str(command):
            socket.send_fds(near, [json.dumps([command, list(files)]).encode()], list(files))
            return waiting.pop()
        started: int = start_anew(path, arguments, files)
        return started

    multiprocessing.util.spawnv_passfds = start


def _become_fork_server(orders: socket.socket) -> None:
    """Wait for the order; the end of the one who could give it is the end."""
    code = 1
    try:
        content, given, _, _ = socket.recv_fds(orders, _MOST_BYTES, 16)
        orders.close()
        if content:
            command, wanted = json.loads(content)
            # The command names the files by their numbers: first out of each other's way, then where they belong.
            moved = [os.dup2(file, 500 + place, inheritable=False) for place, file in enumerate(given)]
            for file, number in zip(moved, wanted, strict=True):
                os.dup2(file, number)
                os.close(file)
            for file in set(given) - set(wanted):
                os.close(file)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            exec(command, {"__name__": "__main__"})
        code = 0
    except SystemExit:
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)
