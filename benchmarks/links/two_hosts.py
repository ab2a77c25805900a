"""Two hosts on this machine with a cable between them: network namespaces and a veth pair. Each rank sets the speed of
what it sends: a token bucket of the kernel (tc, tbf). Needs root, ip, unshare and tc. Plain Python 3."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

BURST_BYTES = 256 << 10
"""what an idle link takes at once"""
QUEUE_MS = 3000
"""what waits longer is lost: more than a window of TCP here"""
RECEIVED = pathlib.Path("/sys/class/net/eth0/statistics/rx_bytes")


class TwoHosts:
    """`with TwoHosts() as hosts:` 0 and 1."""

    def __init__(self) -> None:
        self.names = [f"zl{os.getpid()}h{host}" for host in (0, 1)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def __enter__(self) -> TwoHosts:
        if os.getuid() != 0 or not all(shutil.which(name) for name in ("ip", "tc", "unshare")):
            sys.exit("two hosts on one machine need root, and the programs ip, tc and unshare")
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", self.names[0], "type", "veth", "peer", "eth0", "netns", self.names[1])
            for name, address in zip(self.names, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def inside(self, host: int) -> list[str]:
        """What a command follows that runs there, under a host name of its own."""
        script = f'hostname {self.names[host]} && exec "$@"'
        return ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", script, "sh"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def limit(gbit: float) -> None:
    """Of what the calling rank sends from now on; 0: no limit."""
    device = ["dev", "eth0", "root"]
    if gbit == 0:
        subprocess.run(["tc", "qdisc", "del", *device], check=False, capture_output=True)
        return
    bucket = ["tbf", "rate", f"{gbit * 1000:g}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
    subprocess.run(["tc", "qdisc", "replace", *device, *bucket], check=True)


def received_bytes() -> int:
    """By this host, with the headers of all packets."""
    return int(RECEIVED.read_text())
