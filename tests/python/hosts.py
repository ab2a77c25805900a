"""Several hosts on this machine: network namespaces on one bridge, each with a name and /dev/shm of its own. Needs
root. Instead of ssh, mpirun and zeroth-run enter the namespace."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

import forked

if TYPE_CHECKING:
    import job

ENTER = """#!/bin/bash
# HOST COMMAND...
while [[ $1 == -* ]]; do shift; done
host=${1##*.}
shift
exec ip netns exec NAMEh$host unshare --uts --mount /bin/sh -c "hostname host-$host && mount -t tmpfs tmpfs /dev/shm && $*"
"""  # noqa: E501


# In place of ssh for zeroth-run: the command runs in the namespace, and its standard streams cross the network as those
# of ssh do. The host's own name leads to loopback there, as Debian has it.
SSH = """#!/usr/bin/env python3
import os, socket, subprocess, sys, threading
NAME, NET = {name!r}, {net!r}
HERE = NET + ".250"
if sys.argv[1] == "inside":
    number, port, command = sys.argv[2:]
    subprocess.run(["hostname", "host-" + number], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["mount", "--bind", os.path.dirname(__file__) + "/etc-hosts-" + number, "/etc/hosts"], check=True)
    stream = socket.create_connection((HERE, int(port)))
    os.dup2(stream.fileno(), 0)
    os.dup2(stream.fileno(), 1)
    connection = {{"SSH_CONNECTION": f"{{HERE}} 50000 {{NET}}.{{number}} 22"}} if {says_address!r} else {{}}
    os.execvpe("sh", ["sh", "-c", command], {{**os.environ, **connection}})
host, *command = sys.argv[sys.argv.index("--") + 1:]
number = host.replace("-", ".").rsplit(".", 1)[-1]
server = socket.create_server((HERE, 0))
server.settimeout(10)
enter = ["ip", "netns", "exec", NAME + "h" + number, "unshare", "--uts", "--mount", sys.executable, __file__, "inside", number]
subprocess.Popen([*enter, str(server.getsockname()[1]), " ".join(command)], start_new_session=True, stdin=subprocess.DEVNULL, cwd="/")
stream, _ = server.accept()

def copy(read, write, end):
    while data := read():
        write(data)
    end()

threading.Thread(target=copy, args=(lambda: os.read(0, 65536), stream.sendall, lambda: stream.shutdown(socket.SHUT_WR)), daemon=True).start()
copy(lambda: stream.recv(65536), lambda data: os.write(1, data), lambda: None)
"""  # noqa: E501


NUMBERS = itertools.count()
"""The kernel takes its time to forget a name."""


LOST_OVER_A_CUT_CABLE = (
    r"\[PEER_LOST\] rank [23] \(pid \d+ on \S+\) (is gone|has given no sign of life).*who: rank [01]/4(, [^;]+)?; expected: .* from rank [23]; "  # noqa: E501
    r"got: ranks? 0.* waits? for .* at \S+mpi_rank\.py:\d+"
)
"""what ranks 0 and 1 of mpi_rank.py say of the host of ranks 2 and 3: MPI and gloo do not see it, the control plane
does, before their deadline"""


def verdict(family: job.Family, limit_s: float = 60) -> str:
    """What `family` has written to standard error by the time that a rank is lost or late."""
    begin = time.monotonic()
    while not re.search(r"\[(TIMEOUT|PEER_LOST)\].*\n", family.output("err")):
        assert time.monotonic() - begin < limit_s, family.output("err")
        time.sleep(0.1)
    return family.output("err")


def why_not() -> str:
    """Why there can be no hosts here, "" if there can."""
    if os.getuid() != 0:
        return "not root: network namespaces"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "not permitted: no ip or unshare"
    name = f"zt{os.getpid()}"
    for arguments in (
        ["netns", "add", name],
        ["link", "add", name, "type", "bridge"],
        ["link", "del", name],
        ["netns", "del", name],
    ):
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
        self.agent = self.program("enter", ENTER.replace("NAME", self.name))
        for host in range(1, self.count + 1):
            names = [
                f"{self.net}.{other} host-{other}" if other != host else f"127.0.1.1 host-{host}"
                for other in range(1, self.count + 1)
            ]
            pathlib.Path(self.folder.name, f"etc-hosts-{host}").write_text(
                "\n".join(["127.0.0.1 localhost", *names, ""])
            )
        try:
            self.ip("link", "add", f"{self.name}b", "type", "bridge")
            self.ip("addr", "add", f"{self.net}.250/24", "dev", f"{self.name}b")
            self.ip("link", "set", f"{self.name}b", "up")
            for host in range(1, self.count + 1):
                self.ip("netns", "add", f"{self.name}h{host}")
                self.ip(
                    "link",
                    "add",
                    f"{self.name}v{host}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    f"{self.name}h{host}",
                )
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

    def program(self, name: str, text: str) -> pathlib.Path:
        path = pathlib.Path(self.folder.name, name)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def ssh(self, *, says_address: bool = True) -> pathlib.Path:
        """For zeroth-run --ssh, which calls the hosts NET.1, NET.2, ... or host-1, host-2, ... `says_address`: as sshd
        does, in SSH_CONNECTION."""
        return self.program("ssh", SSH.format(name=self.name, net=self.net, says_address=says_address))

    def inside(self, host: int) -> list[str]:
        """What a command follows that runs there, under the host's own name."""
        script = f'hostname host-{host} && mount -t tmpfs tmpfs /dev/shm && mount --bind {self.folder.name}/etc-hosts-{host} /etc/hosts && exec "$@"'  # noqa: E501
        return ["ip", "netns", "exec", f"{self.name}h{host}", "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]

    def cut(self, host: int) -> None:
        """Its cable."""
        self.ip("link", "set", f"{self.name}v{host}", "down")

    def throttle(self, host: int, rate: str) -> None:
        """What comes to it: "40mbit"."""
        subprocess.run(
            [
                "tc",
                "qdisc",
                "add",
                "dev",
                f"{self.name}v{host}",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "64kb",
                "latency",
                "50ms",
            ],
            check=True,
            capture_output=True,
        )

    def mpirun(self, mpirun: str, ranks_per_host: int, *program: str, python: list[str] | None = None) -> list[str]:
        """The command; `python` runs the program in place of one that has imported torch."""
        hosts = ",".join(f"{self.net}.{host}:{ranks_per_host}" for host in range(1, self.count + 1))
        exported = ("PYTHONPATH", "OMP_NUM_THREADS", "ZEROTH_BACKEND", "RANKS_PER_NODE")
        return [
            mpirun,
            "--mca",
            "plm_rsh_agent",
            str(self.agent),
            "--mca",
            "btl",
            "self,vader,tcp",
            "--mca",
            "btl_tcp_if_include",
            f"{self.net}.0/24",
            "--mca",
            "oob_tcp_if_include",
            f"{self.net}.0/24",
            "--bind-to",
            "none",
            "-H",
            hosts,
            "-n",
            str(self.count * ranks_per_host),
            *(part for name in exported for part in ("-x", name)),
            *(python or forked.python()),
            *program,
        ]
