"""Which network interface leads from this rank to the ranks on other hosts.

Left to itself, gloo listens at the address of the host's name. On many systems (Debian's /etc/hosts) that is a loopback
address, which no other host can reach. Ranks away from the store's host know which of their addresses leads there;
ranks beside the store learn it from one that is away.
"""

import socket
import struct
import sys
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

PERIOD = 0.02
"""Seconds between two looks at the store."""
SIOCGIFADDR = 0x8915  # linux/sockios.h


def find_interface(store: Store, *, master: str, num_ranks: int, timeout: timedelta) -> str | None:
    """The interface's name, the loopback's if all ranks are on one host, None if it cannot be told.

    Every rank calls it, with a store that no earlier attempt has used. `master` is the host that keeps the store.
    """
    theirs, own = find_route(master)
    if theirs != own:
        store.set("away", own)
    else:
        store.add("beside", 1)
        deadline = time.monotonic() + timeout.total_seconds()
        while not store.check(["away"]):
            if store.add("beside", 0) == num_ranks:
                return find_loopback()
            if time.monotonic() > deadline:
                return None  # whoever is missing will be named when the group is joined
            time.sleep(PERIOD)
        _, own = find_route(store.get("away").decode())
    return find_interface_of(own)


def find_route(host: str) -> tuple[str, str]:
    """A host's address as this one knows it, and this one's own address on the way there; equal if it is this one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the kernel only looks up the route
        theirs, own = str(address[0]), str(probe.getsockname()[0])
    # Any loopback address is this host; the kernel answers 127.0.0.1 for all of them.
    return (own if own in ("127.0.0.1", "::1") else theirs), own


def find_interface_of(address: str) -> str | None:
    """The interface with this IPv4 address; None if there is none, or the system does not tell."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def find_loopback() -> str | None:
    """The interface that only this host can reach; Linux and macOS name it differently."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
