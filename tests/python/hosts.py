"""Several hosts on this machine: network namespaces on one bridge, each with a name and /dev/shm of its own. Needs root. Instead of ssh, mpirun
enters the namespace."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ENTER = """#!/bin/bash
# HOST COMMAND...
while [[ $1 == -* ]]; do shift; done
host=${1##*.}
shift
exec ip netns exec NAMEh$host unshare --uts --mount /bin/sh -c "hostname host-$host && mount -t tmpfs tmpfs /dev/shm && $*"
"""


NUMBERS = itertools.count()
"""The kernel takes its time to forget a name."""


def why_not() -> str:
    """Why there can be no hosts here, "" if there can."""
    if os.getuid() != 0:
        return "not root: network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "not permitted: no ip or unshare"
    name = f"zt{os.getpid()}"
    for arguments in (["netns", "add", name], ["link", "add", name, "type", "bridge"], ["link", "del", name], ["netns", "del", name]):
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"not permitted: ip {' '.join(arguments)}: {done.stderr.strip()}"
    return ""


class Hosts:
    """`with Hosts(2) as hosts:` 1, 2, ...; the machine itself can reach them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"z{os.getpid() % 100_000}{next(NUMBERS)}"
        self.net = f"10.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def __enter__(self) -> Hosts:
        self.folder = tempfile.TemporaryDirectory()
        self.agent = pathlib.Path(self.folder.name, "enter")
        self.agent.write_text(ENTER.replace("NAME", self.name))
        self.agent.chmod(0o755)
        try:
            self.ip("link", "add", f"{self.name}b", "type", "bridge")
            self.ip("addr", "add", f"{self.net}.250/24", "dev", f"{self.name}b")
            self.ip("link", "set", f"{self.name}b", "up")
            for host in range(1, self.count + 1):
                self.ip("netns", "add", f"{self.name}h{host}")
                self.ip("link", "add", f"{self.name}v{host}", "type", "veth", "peer", "name", "eth0", "netns", f"{self.name}h{host}")
                self.ip("link", "set", f"{self.name}v{host}", "master", f"{self.name}b", "up")
                self.ip("-n", f"{self.name}h{host}", "addr", "add", f"{self.net}.{host}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    self.ip("-n", f"{self.name}h{host}", "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(1, self.count + 1):
            subprocess.run(["ip", "link", "del", f"{self.name}v{host}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", f"{self.name}h{host}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], check=False, capture_output=True)
        self.folder.cleanup()

    def cut(self, host: int) -> None:
        """Its cable."""
        self.ip("link", "set", f"{self.name}v{host}", "down")

    def throttle(self, host: int, rate: str) -> None:
        """What comes to it: "40mbit"."""
        subprocess.run(["tc", "qdisc", "add", "dev", f"{self.name}v{host}", "root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"],
                       check=True, capture_output=True)

    def mpirun(self, mpirun: str, ranks_per_host: int, *program: str) -> list[str]:
        hosts = ",".join(f"{self.net}.{host}:{ranks_per_host}" for host in range(1, self.count + 1))
        exported = ("PYTHONPATH", "OMP_NUM_THREADS", "ZEROTH_BACKEND", "RANKS_PER_NODE")
        return [mpirun, "--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "self,vader,tcp",
                "--mca", "btl_tcp_if_include", f"{self.net}.0/24", "--mca", "oob_tcp_if_include", f"{self.net}.0/24",
                "--bind-to", "none", "-H", hosts, "-n", str(self.count * ranks_per_host),
                *(part for name in exported for part in ("-x", name)), sys.executable, *program]
