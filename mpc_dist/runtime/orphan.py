"""A rank does not outlive its launcher: one that nobody waits for would hold its GPU and its run folder."""

import ctypes
import signal
import sys

from mpc_dist.runtime.mesh import Launch

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def die_with_launcher(launch: Launch) -> None:
    """Have the system kill this process when the one that started it ends; on Linux, and only under a launcher.

    A single process may well outlive the shell that started it.
    """
    if launch.world_size == 1 or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
