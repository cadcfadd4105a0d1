"""Hosts in network namespaces: they reach each other, links are as asked for, and nothing is left of them."""

import os
import subprocess
import sys

import pytest

from mpc_dist.bench import hosts
from mpc_dist.bench.hosts import PREFIX, TABLES, Network, why_not
from tests.conftest import ROOT

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("on", flush=True)
    connection, _ = server.accept()
    while size := int.from_bytes(connection.recv(8), "big"):
        while size:
            size -= len(connection.recv(min(size, 1 << 20)))
        connection.sendall(b"k")
"""
ASK = """
import socket, sys, time
with socket.create_connection(("host1", 5000), timeout=2) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in map(int, sys.argv[1:]):
        begin = time.perf_counter()
        connection.sendall(size.to_bytes(8, "big") + bytes(size))
        connection.recv(1)
        print(time.perf_counter() - begin)
    connection.sendall(bytes(8))
print(socket.gethostname())
"""


@pytest.fixture
def permitted() -> None:
    if reason := why_not():
        pytest.skip(reason)


def exchange(network: Network, *sizes: int) -> list[str]:
    """What host 0 says of sending so many bytes to host 1, each time until it is answered."""
    first, second = network.hosts
    with network.start(second, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "on\n"
        asking = [sys.executable, "-c", ASK, *map(str, sizes)]
        with network.start(first, asking, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
            said, _ = client.communicate(timeout=30)
        server.kill()
    return said.splitlines()


def left_over(process: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True)
    tables = [path.name for path in TABLES.iterdir()] if TABLES.exists() else []
    return [line for line in [*listed.stdout.splitlines(), *tables] if line.startswith(f"{PREFIX}-{process}-")]


@pytest.mark.usefixtures("permitted")
def test_a_link_can_be_cut_and_mended():
    with Network(2) as network:
        assert exchange(network, 1)[-1] == "host0"
        network.cut(network.hosts[1])
        assert exchange(network, 1) == []
        network.mend(network.hosts[1])
        assert exchange(network, 1)[-1] == "host0"


@pytest.mark.usefixtures("permitted")
def test_limits_are_what_was_asked_for():
    with Network(2) as network:
        network.limit(delay=0.02)
        assert float(exchange(network, 1)[0]) >= 0.04  # there and back
        network.limit(rate=20e6)
        seconds = float(exchange(network, 500_000)[0])
        assert seconds > 0.8 * 0.2  # a bucket of it goes at once
        network.limit(delay=0.02, rate=20e6)
        assert float(exchange(network, 1, 500_000)[1]) >= 0.8 * 0.2 + 0.04
        network.limit()
        # Without limits, it is far from all of these; the best of three, since the machine may be busy.
        assert min(map(float, exchange(network, 500_000, 500_000, 500_000)[:3])) < 0.04


@pytest.mark.usefixtures("permitted")
def test_nothing_is_left_after_a_failure():
    network = Network(2)
    with pytest.raises(ZeroDivisionError), network:  # noqa: PT012
        network.limit(delay=0.001)
        process = network.start(network.hosts[0], ["sleep", "100"])
        assert left_over(os.getpid())
        raise ZeroDivisionError
    assert process.wait(20) != 0
    assert not left_over(os.getpid())


MAKE_AND_DIE = """
import os, signal
from mpc_dist.bench.hosts import Network
network = Network(1).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("permitted")
def test_what_a_killed_process_left_is_removed_by_the_next():
    dead = subprocess.Popen([sys.executable, "-c", MAKE_AND_DIE], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    dead.wait(60)
    assert left_over(dead.pid)
    with Network(1):
        assert not left_over(dead.pid)


@pytest.mark.usefixtures("permitted")
def test_networks_side_by_side_do_not_meet():
    with Network(2) as one, Network(2) as other:
        other.cut(other.hosts[0])
        assert exchange(one, 1)[-1] == "host0"
        assert exchange(other, 1) == []


def test_the_reason_is_given_where_hosts_cannot_be_made(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert "tc not found" in str(why_not())
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    assert why_not() == "network namespaces need Linux, this is darwin"
