"""Two machines on one: network namespaces with an address each, joined by a virtual cable (Linux, root, iproute2)."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Namespace:
    """A machine's network: ``name`` for ``ip netns exec``, and its IPv4 ``address``."""

    name: str
    address: str

    @property
    def wrapper(self) -> list[str]:
        """What to put in front of a command so that it runs there."""
        return ["ip", "netns", "exec", self.name]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@functools.cache
def missing() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if shutil.which("ip") is None:
        return "needs the program ip (iproute2)"
    try:
        with two_machines():
            return None
    except subprocess.CalledProcessError as error:
        return f"needs to make network namespaces (root, CAP_NET_ADMIN): {error.stderr.strip()}"


@contextlib.contextmanager
def two_machines() -> Iterator[list[Namespace]]:
    """Two namespaces that reach each other and nothing else; gone afterwards."""
    own = os.getpid()
    machines = [Namespace(f"a8-{own}-{number}", f"10.213.{own % 250}.{number + 1}") for number in range(2)]
    cable = [f"a8{own % 10**7}v{number}" for number in range(2)]
    try:
        for machine in machines:
            ip("netns", "add", machine.name)
        ip(
            "link",
            "add",
            cable[0],
            "netns",
            machines[0].name,
            "type",
            "veth",
            "peer",
            cable[1],
            "netns",
            machines[1].name,
        )
        for machine, end in zip(machines, cable, strict=True):
            ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", end)
            ip("-n", machine.name, "link", "set", end, "up")
            ip("-n", machine.name, "link", "set", "lo", "up")
            subprocess.run([*machine.wrapper, "true"], check=True, capture_output=True, text=True)
        yield machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)
