"""Which network interface of this machine leads to the others.

gloo listens at the address of the machine's host name, which may be another network's, or at loopback, where no other
machine reaches it. The right interface is the one by which the launcher itself reached machine 0.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915
"""From ``linux/sockios.h``: the IPv4 address of an interface; see netdevice(7)."""


def interface_of(address: str) -> str | None:
    """Name of the interface that has ``address``, an IP address; None if there is none, or off Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        return _interface_of_ipv6(wanted.packed.hex())
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == wanted.packed:
            return name
    return "lo" if wanted.is_loopback else None  # 127.0.0.2 is loopback's too


def _ipv4_of(interface: str) -> bytes | None:
    import fcntl  # not on Windows, where the rest of the package imports

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return answer[20:24]
    return None


def _interface_of_ipv6(digits: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found, _, _, _, _, name = line.split()
            if found == digits:
                return name
    return None
