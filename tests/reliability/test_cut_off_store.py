"""Nothing waits without limit for a store that does not answer, as behind a cut network: its process is stopped."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from mpc_dist.runtime.lines import call_within
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.preemption import GONE_SECONDS, PERIOD, Preemption
from mpc_dist.runtime.pulse import LOOK_PERIODS, Pulse
from mpc_dist.runtime.pulse import PERIOD as PULSE_PERIOD

KEEP = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Keeper:
    """A process that keeps a store, and a connection to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.pid = process.pid
        port = int(process.stdout.readline())
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    command = [sys.executable, "-c", KEEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Keeper(process)
        finally:
            process.kill()


def test_a_call_is_given_up_in_time_and_errors_pass(keeper: Keeper):
    keeper.store.set("key", "value")
    assert call_within(20, lambda: keeper.store.get("key")) == b"value"
    with pytest.raises(ZeroDivisionError):
        call_within(20, lambda: 1 // 0)
    keeper.stop()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.3 s"):
        call_within(0.3, lambda: keeper.store.check(["key"]))
    assert time.monotonic() - begin < 5


def fail(port: int, keeper: int) -> None:
    """As a rank that fails while its thread waits for the store; ends with 3 if that took long."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    begin = 0.0
    try:
        with Preemption(Launch(1, 2), after=0, grace=20.0, store=store):
            os.kill(keeper, signal.SIGSTOP)
            time.sleep(1.5 * PERIOD)  # its thread asks the store by now
            begin = time.monotonic()
            raise ZeroDivisionError
    except ZeroDivisionError:
        sys.exit(0 if time.monotonic() - begin < 2 * GONE_SECONDS + 3 else 3)  # a busy machine


def test_a_rank_that_fails_ends_although_its_thread_waits_for_the_store(keeper: Keeper):
    process = multiprocessing.get_context("forkserver").Process(target=fail, args=(keeper.store.port, keeper.pid))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


def test_nobody_is_blamed_for_silence_that_cannot_be_heard(keeper: Keeper):
    with Pulse(Launch(0, 2), store=keeper.store) as pulse:
        keeper.stop()
        begin = time.monotonic()
        assert pulse.find_silent() == []
    assert time.monotonic() - begin < 2 * LOOK_PERIODS * PULSE_PERIOD + 5
