"""zeroth-run over a real ssh: an sshd with keys of its own in each of two hosts, which are network namespaces. Needs
root and Debian's openssh-server, which nothing installs: it would open a port of the machine."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import hosts  # noqa: E402
import launching  # noqa: E402
import left_behind  # noqa: E402
from launching import PROBE, Run, Stage  # noqa: E402

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
SERVER = """ListenAddress {address}
Port 22
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
"""
CLIENT = """Host one
  HostName {net}.1
Host two
  HostName {net}.2
Host *
  IdentitiesOnly yes
  IdentityFile {folder}/{key}
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking yes
"""


class Sshd(unittest.TestCase):
    def setUp(self) -> None:
        self.net = hosts.Hosts(2)
        self.net.__enter__()
        self.addCleanup(self.net.__exit__)
        self.stage = Stage()
        self.stage.__enter__()
        self.addCleanup(self.stage.__exit__)
        for key in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.stage.folder / key], check=True)
        host_key = (self.stage.folder / "host.pub").read_text()
        (self.stage.folder / "known").write_text("".join(f"{self.net.net}.{number} {host_key}" for number in (1, 2)))
        self.use_key("user")
        ssh = self.stage.folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec ssh -F {self.stage.folder}/client "$@"\n')
        ssh.chmod(0o755)
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it; on a machine with systemd it is there
        self.servers = [self.serve(number) for number in (1, 2)]

    def use_key(self, key: str) -> None:
        (self.stage.folder / "client").write_text(CLIENT.format(net=self.net.net, folder=self.stage.folder, key=key))

    def serve(self, number: int) -> subprocess.Popen[bytes]:
        settings = self.stage.folder / f"server{number}"
        settings.write_text(SERVER.format(address=f"{self.net.net}.{number}", folder=self.stage.folder))
        server = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                f"{self.net.name}h{number}",
                SSHD,
                "-D",
                "-f",
                settings,
                "-E",
                self.stage.folder / f"log{number}",
            ]
        )
        self.addCleanup(self.close, server)
        end = time.monotonic() + launching.PATIENCE_S
        while "Server listening" not in (
            log.read_text() if (log := self.stage.folder / f"log{number}").exists() else ""
        ):
            self.assertLess(time.monotonic(), end, "sshd does not listen")
            time.sleep(0.02)
        return server

    @staticmethod
    def close(server: subprocess.Popen[bytes]) -> None:
        server.kill()
        server.wait()

    def start(self, *program: str, **variables: str) -> Run:
        return self.stage.run(
            "--no-merge",
            "--hosts",
            "one:1,two:2",
            "--remote-program",
            launching.RUN,
            *program,
            ZEROTH_SSH=str(self.stage.folder / "ssh"),
            **variables,
        )

    def test_arguments_variables_and_directory_arrive_as_they_are(self) -> None:
        """On ssh's own command line a shell of the host would have read them."""
        awkward = "two words; $(exit 3) \"'\\\n`x` *"
        program = "import os, sys; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.getcwd(), [os.environ['AWKWARD'], sys.argv[1]])"  # noqa: E501
        run = self.start(sys.executable, "-c", program, awkward, AWKWARD=awkward)
        self.assertEqual(run.code(), 0, run.err)
        place = pathlib.Path.cwd()
        self.assertEqual(
            sorted(run.out.splitlines()),
            [f"[{rank}] {rank} {local} {place} {[awkward, awkward]!r}" for rank, local in ((0, 0), (1, 0), (2, 1))],
        )

    def test_a_rank_that_is_killed_on_a_host_ends_the_others(self) -> None:
        run = self.start("sh", "-c", "[ $RANK = 2 ] && kill -9 $$; sleep 100")
        self.assertEqual(run.code(), 128 + 9)
        self.assertRegex(
            run.err,
            r"zeroth-run: rank 2 \(pid \d+ on two\) was killed by signal 9 \(SIGKILL\); the other 2 ranks were ended\.",
        )
        self.only_servers_are_left()

    def test_ctrl_c_ends_ranks_behind_ssh(self) -> None:
        run = self.start(PROBE, "wait", "child")
        run.pids("READY", 3)
        run.process.send_signal(2)
        self.assertEqual(run.code(), 128 + 2)
        self.only_servers_are_left()

    def test_the_end_of_a_session_names_its_host(self) -> None:
        run = self.start(PROBE, "wait", "ignore", "child")
        run.pids("READY", 3)
        self.close(self.servers[1])  # and of its sessions, as with the host
        subprocess.run(["sh", "-c", f"kill -9 $(ip netns pids {self.net.name}h2)"], check=True)
        self.assertEqual(run.code(), 76)
        self.assertIn("zeroth-run: host two (ranks 1-2): [PEER_LOST] ", run.err)
        self.servers.pop()
        self.only_servers_are_left()

    def test_a_host_that_lets_nobody_in_is_named_with_the_words_of_ssh(self) -> None:
        self.use_key("stranger")
        self.expect_refusal("one", "Permission denied (publickey")
        self.use_key("user")
        (self.stage.folder / "known").write_text("")
        self.expect_refusal("two", "Host key verification failed.")

    def test_a_host_without_sshd_is_named(self) -> None:
        self.close(self.servers[1])
        self.expect_refusal("two", "Connection refused")

    def expect_refusal(self, host: str, words: str) -> None:
        run = self.start(PROBE, "wait")
        self.assertEqual(run.code(), 69, run.err)
        self.assertIn("[LAUNCH] ", run.err)
        self.assertRegex(
            run.err.replace("\r", ""), rf"host {host}: .* exited with code 255: [^|]*{words.replace('(', '[(]')}"
        )

    def only_servers_are_left(self) -> None:
        end = time.monotonic() + 5
        while len(left := left_behind.living_descendants()) > len(self.servers):
            self.assertLess(time.monotonic(), end, left)
            time.sleep(0.02)


if __name__ == "__main__":
    if not pathlib.Path(SSHD).exists() or shutil.which("ssh") is None:
        print("SKIPPED: no sshd: openssh-server")
        sys.exit(77)
    if reason := hosts.why_not():
        print(f"SKIPPED: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
