"""A cable of a given length: passes Ethernet frames between the ports of a switch after a fixed delay.

python wire.py SECONDS PORT ...      (in the switch's network namespace, as root)

Many kernels lack netem, which would do this. It is run as a file of its own, so that it starts without torch. Port i
leads to the host whose hardware address ends in i; whatever goes to no host in particular goes to all.
"""

import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
ETH_P_ALL = 3
HEADER = 10
"""Bytes of virtio_net_hdr, which says what of checksum and segmentation is still to be done."""
LARGEST = 1 << 17
BUFFER = 1 << 24
"""Bytes of frames that may wait to be read."""
READY = "ready"


def open_port(name: str) -> socket.socket:
    """A socket that reads every frame coming out of this interface, and writes into it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # Frames come and go as the kernel made them: up to 64 KiB long, their checksums not computed.
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def carry(delay: float, ports: list[socket.socket]) -> None:
    """Pass frames on for ever; a port that is down loses them, as a cut cable does."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        patience = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for port in select.select(ports, [], [], patience)[0]:
            try:
                frame = port.recv(LARGEST)
            except OSError:
                continue
            due, last = time.monotonic() + delay, frame[HEADER + 5]
            is_for_all = frame[HEADER] & 1
            origin = ports.index(port)
            receivers = range(len(ports)) if is_for_all or last >= len(ports) else (last,)
            under_way.extend((due, receiver, frame) for receiver in receivers if receiver != origin)
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, receiver, frame = under_way.popleft()
            try:
                ports[receiver].send(frame)
            except OSError:
                continue


if __name__ == "__main__":
    opened = [open_port(name) for name in sys.argv[2:]]
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    carry(float(sys.argv[1]), opened)
