"""Several hosts on one machine: network namespaces with a cable each to a switch, which can be cut, mended and limited.

A host has its own loopback, address, name and table of names; files and clock are shared. Nothing outside of the
namespaces is changed, but for /etc/netns, where `ip netns exec` finds a host's table of names. Needs Linux and root.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpc_dist.bench import wire

PREFIX = "mpcdist"
TABLES = Path("/etc/netns")
"""Where `ip netns exec` looks for files that a namespace has instead of those in /etc."""
CARD = "eth0"
SECONDS = 20.0
"""For a command of `ip` or `tc`."""
FULL_SPEED = ("initcwnd", "1000", "initrwnd", "1000")
LARGE_BUFFERS = "cd /proc/sys/net/ipv4 && for file in tcp_rmem tcp_wmem; do echo 4096 4194304 16777216 >$file; done"
"""TCP may fill a link from its first message on: what is limited is the link, not what TCP has learnt of it so far."""
ENTER = 'hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class Host:
    """One of them."""

    number: int
    namespace: str

    @property
    def name(self) -> str:
        """As the others know it."""
        return f"host{self.number}"

    @property
    def address(self) -> str:
        """In its own network only."""
        return f"10.77.0.{self.number + 1}"


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    missing = [name for name in ("ip", "tc", "unshare", "hostname") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; install iproute2, util-linux and hostname"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Network(1):
            return None
    except (OSError, RuntimeError) as error:
        return f"network namespaces are not permitted here: {error}"


class Network:
    """Hosts that reach each other; as a context it ends with all their processes, whatever happened."""

    def __init__(self, num_hosts: int, *, own_name: str = "card") -> None:
        """`own_name`: whether a host's own name means its `card`'s address or, as on Debian, its `loopback`'s."""
        token = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
        self.hosts = tuple(Host(number, f"{token}-{number}") for number in range(num_hosts))
        self._switch = f"{token}-switch"
        self._own_name = own_name
        self._wire: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Network":
        try:
            remove_left_over()
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def start(self, host: Host, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a command on a host, with the options of `Popen`."""
        enter = ["ip", "netns", "exec", host.namespace, "unshare", "--uts", "sh", "-c", ENTER, host.name]
        return subprocess.Popen([*enter, *command], text=True, **options)

    def cut(self, host: Host) -> None:
        """Pull this host's cable: nobody is told, frames are lost."""
        _ip("-n", self._switch, "link", "set", _port(host), "down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        _ip("-n", self._switch, "link", "set", _port(host), "up")

    def limit(self, *, delay: float = 0.0, rate: float | None = None) -> None:
        """Make every frame take `delay` seconds from host to host, and each pair's way `rate` bits per second."""
        self._limit_rate(rate)
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            self._wire = None
        for host in self.hosts:
            _ip("-n", self._switch, "link", "set", _port(host), *(["nomaster"] if delay else ["master", "bridge"]))
        if delay:
            command = ["ip", "netns", "exec", self._switch, sys.executable, "-I", str(wire.__file__)]
            command += [str(delay), *map(_port, self.hosts)]
            self._wire = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._wire.stdout is not None
            with self._wire.stdout as said:
                if said.readline().strip() != wire.READY:
                    raise RuntimeError("the delaying wire did not start; see its error above")

    def _limit_rate(self, rate: float | None) -> None:
        for host in self.hosts:
            tc = ["-n", host.namespace]
            _run("tc", *tc, "qdisc", "replace", "dev", CARD, "root", "noqueue")
            if rate is None:
                continue
            _run("tc", *tc, "qdisc", "replace", "dev", CARD, "root", "handle", "1:", "htb")
            for other in self.hosts:
                if other != host:
                    flow = f"1:{other.number + 1}"
                    of_class = ["dev", CARD, "parent", "1:", "classid", flow, "htb", "rate", f"{rate:.0f}bit"]
                    _run("tc", *tc, "class", "add", *of_class, "quantum", "60000")
                    match = ["u32", "match", "ip", "dst", f"{other.address}/32", "flowid", flow]
                    _run("tc", *tc, "filter", "add", "dev", CARD, "parent", "1:", "protocol", "ip", *match)

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            ends = [CARD, "netns", host.namespace, "type", "veth", "peer", "name", _port(host)]
            _ip("-n", self._switch, "link", "add", *ends, "netns", self._switch)
            here = ["-n", host.namespace]
            _ip(*here, "link", "set", CARD, "address", f"02:00:00:00:00:{host.number:02x}", "up")
            _ip(*here, "address", "add", f"{host.address}/24", "dev", CARD)
            _ip(*here, "link", "set", "lo", "up")
            _ip(*here, "route", "replace", "10.77.0.0/24", "dev", CARD, *FULL_SPEED)
            _ip("netns", "exec", host.namespace, "sh", "-c", LARGE_BUFFERS)
            _ip("-n", self._switch, "link", "set", _port(host), "master", "bridge", "up")
            folder = TABLES / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(self._table(host), encoding="ascii")

    def _table(self, host: Host) -> str:
        own = host.address if self._own_name == "card" else "127.0.1.1"
        lines = [f"{own if other == host else other.address} {other.name}" for other in self.hosts]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def _remove(self) -> None:
        for namespace in (self._switch, *(host.namespace for host in self.hosts)):
            remove_namespace(namespace)
        if self._wire is not None:
            self._wire.wait(SECONDS)


def remove_left_over() -> None:
    """Remove the namespaces of processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=SECONDS, check=False)
    for found in re.finditer(rf"^({PREFIX}-(\d+)-\S+)", listed.stdout, re.MULTILINE):
        if not Path(f"/proc/{found[2]}").exists():
            remove_namespace(found[1])


def remove_namespace(name: str) -> None:
    """End the processes in it and remove it; fine if it does not exist."""
    held = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=SECONDS, check=False)
    for pid in map(int, held.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=SECONDS, check=False)
    shutil.rmtree(TABLES / name, ignore_errors=True)


def _port(host: Host) -> str:
    return f"port{host.number}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
