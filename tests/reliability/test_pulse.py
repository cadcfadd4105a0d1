"""Signs of life: who gives none is named, who has left is not."""

import time

from torch.distributed import HashStore

from mpc_dist.runtime import pulse
from mpc_dist.runtime.mesh import Launch
from mpc_dist.runtime.pulse import Pulse
from mpc_dist.runtime.watch import is_timeout


def test_a_rank_without_a_sign_of_life_is_silent_and_one_that_has_left_is_not(monkeypatch):
    monkeypatch.setattr(pulse, "PERIOD", 0.05)
    store = HashStore()
    with Pulse(Launch(0, 4, 0), store=store) as own, Pulse(Launch(1, 4, 1), store=store):
        with Pulse(Launch(2, 4, 2), store=store):
            time.sleep(0.1)
        assert own.find_silent() == [3]  # never came; 1 is alive, and 2 has said that it ends


def test_alone_nobody_is_silent():
    with Pulse(Launch()) as own:
        assert own.find_silent() == []


def test_a_timeout_is_told_from_a_lost_connection():
    assert is_timeout("Timed out waiting 3000ms for recv operation to complete")
    assert is_timeout("wait timeout after 3000ms")
    assert not is_timeout("Connection closed by peer [127.0.0.1]:4711")
