"""`zeroth doctor` on three hosts, which are network namespaces: a throttled cable, a wrong version, a full disk, a
cable that is cut while it is measured, a name that leads to loopback. Needs root."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import doctoring  # noqa: E402
import hosts  # noqa: E402
import launching  # noqa: E402
from doctoring import DOCTOR, LIMIT_S, found, report  # noqa: E402
from launching import Run, Stage  # noqa: E402

NUM_HOSTS = 3
# In place of ssh: the command runs in the namespace, with a name and mounts of its own. "prepare" is what a test wants
# there first.
SSH = """#!/bin/bash
while [[ $1 != -- ]]; do shift; done
host=${{2##*.}}; shift 2
exec ip netns exec {name}h$host unshare --uts --mount /bin/sh -c "hostname host-$host; if [ -e {folder}/prepare$host ]; then . {folder}/prepare$host; fi; exec $*"
"""  # noqa: E501
# An agent of another version: it says hello, and no more.
OTHER_VERSION = """#!/usr/bin/env python3
import sys, time
text = lambda value: len(value).to_bytes(4, "little") + value
number = lambda value: value.to_bytes(8, "little", signed=True)
hello = text(b"0.0.9") + text(b"host-2") + number(4711) + number(0) + number(-1) + number(0) + text(b"")
sys.stdout.buffer.write(b"ZEROTHAG\\x01\\0\\0\\0" + len(hello).to_bytes(4, "little") + b"\\x01" + hello)
sys.stdout.buffer.flush()
time.sleep(60)
"""


class Doctored(unittest.TestCase):
    """With three hosts."""

    def setUp(self) -> None:
        self.net = hosts.Hosts(NUM_HOSTS)
        self.net.__enter__()
        self.addCleanup(self.net.__exit__)
        self.stage = Stage()
        self.stage.__enter__()
        self.addCleanup(self.stage.__exit__)
        self.ssh = self.stage.folder / "ssh"
        self.ssh.write_text(SSH.format(name=self.net.name, folder=self.stage.folder))
        self.ssh.chmod(0o755)

    def address(self, host: int) -> str:
        return f"{self.net.net}.{host}"

    def prepare(self, host: int, shell: str) -> None:
        (self.stage.folder / f"prepare{host}").write_text(shell + "\n")

    def doctor(self, *arguments: str, slots: tuple[int, ...] = (2, 1, 1), **environment: str) -> Run:
        chosen = ",".join(f"{self.address(host)}:{count}" for host, count in enumerate(slots, 1))
        return doctoring.run(
            self.stage,
            "--hosts",
            chosen,
            "--ssh",
            str(self.ssh),
            "--remote-program",
            launching.RUN,
            "--connect-timeout",
            "20",
            *arguments,
            **environment,
        )

    def expect_one(self, run: Run, *words: str) -> str:
        """The finding that has all of these words; there is one."""
        lines = [line for line in found(run) if all(word in line for word in words)]
        self.assertEqual(len(lines), 1, f"{words}\n{run.out}{run.err}")
        return lines[0]


class DoctorOnHosts(Doctored):
    def test_healthy_hosts_and_a_plan_for_their_links(self) -> None:
        run = self.doctor("--params", "7e9", "--memory-gib", "1000", slots=(2, 2, 2))
        self.assertEqual(run.code(LIMIT_S), 0, run.out + run.err)
        for host in (1, 2, 3):
            self.assertRegex(
                run.out,
                rf"\nhost {self.address(host)} \(ranks {2 * host - 2}, {2 * host - 1}\)\n|^host {self.address(host)} ",
            )
        for pair in (
            "0-1       shm   inside",
            "2-3       shm   inside",
            "4-5       shm   inside",
            "0-2       tcp   between",
            "0-4       tcp   between",
            "2-4       tcp   between",
        ):
            self.assertIn(f"\n  {pair} ", run.out)
        self.assertRegex(run.out, r"clock +[+-]\d+\.\d ms against rank 0")
        self.assertRegex(
            run.out,
            r"7e\+09 parameters in bfloat16, 6 ranks on 3 hosts, .* inside a host [\d.]+ .B/s for each rank, between hosts [\d.]+ .B/s for each host",  # noqa: E501
        )
        self.assertIn("\n  proposed: ", run.out)

    def test_a_throttled_cable_and_a_wrong_version_on_four_ranks_are_both_named(self) -> None:
        self.net.throttle(3, "10mbit")
        run = self.doctor(ZEROTH_DOCTOR_PRETEND="version=2:0.0.9")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.assertIn(
            "got: 0.0.9",
            self.expect_one(run, "[MISMATCH] another Zeroth than elsewhere", f"where: {self.address(2)}; who: rank 2"),
        )
        # 10 Mbit/s are 1.25 MB/s, headers included; a policer that drops costs TCP some of it.
        for other in (f"rank 0 ({self.address(1)})", f"rank 2 ({self.address(2)})"):
            line = self.expect_one(
                run, "a link is slow; where: link over tcp", f"who: {other} and rank 3 ({self.address(3)})"
            )
            self.assertRegex(line, r"got: (1\.\d+ MB/s|[1-9]\d\d kB/s) from rank [02] to rank 3, ")
        self.expect_one(run, "all links of one host are slow", f"who: {self.address(3)}")
        self.assertEqual(len(found(run)), 4, run.out)

    def test_a_host_with_another_zeroth_run_is_named_and_the_throttled_cable_of_the_others_too(self) -> None:
        other = self.stage.folder / "other"
        other.write_text(OTHER_VERSION)
        other.chmod(0o755)
        installed = self.stage.folder / "zeroth-run"
        shutil.copy(launching.RUN, installed)
        self.prepare(2, f"mount --bind {other} {installed}")
        self.net.throttle(3, "10mbit")
        run = doctoring.run(
            self.stage,
            "--hosts",
            f"{self.address(1)}:1,{self.address(2)}:1,{self.address(3)}:2",
            "--ssh",
            str(self.ssh),
            "--remote-program",
            str(installed),
            "--connect-timeout",
            "20",
        )
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.assertIn("0.0.9", self.expect_one(run, "[LAUNCH] a host cannot take part", f"where: {self.address(2)}"))
        # Of two hosts the way back is what is usual.
        self.assertRegex(
            self.expect_one(run, "a link is slow", f"and rank 1 ({self.address(3)})"),
            r"got: (1\.\d+ MB/s|[1-9]\d\d kB/s) from rank 0 to rank 1",
        )

    def test_a_full_disk_a_wrong_clock_and_a_name_that_leads_to_loopback(self) -> None:
        (self.stage.folder / "disk").mkdir()
        (self.stage.folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host-3\n")
        self.prepare(2, f"mount -t tmpfs -o size=64k tmpfs {self.stage.folder}")
        self.prepare(3, f"mount --bind {self.stage.folder}/hosts /etc/hosts")
        run = self.doctor(ZEROTH_DOCTOR_PRETEND="clock=3:-9000")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.expect_one(
            run, "[IO] a file cannot be written and read back", f"where: {self.address(2)}", "No space left on device"
        )
        self.expect_one(
            run,
            "[LAUNCH] a host's own name leads to loopback",
            f"where: {self.address(3)}; which: host-3",
            "got: 127.0.1.1",
        )
        self.assertRegex(
            self.expect_one(run, "[ENVIRONMENT] a clock is wrong", f"where: {self.address(3)}"),
            r"got: (8[89]|9[01])\d\d ms behind",
        )

    def test_two_hosts_that_do_not_reach_each_other(self) -> None:
        """Each reaches rank 0's."""
        for host, other in ((2, 3), (3, 2)):
            subprocess.run(
                ["ip", "-n", f"{self.net.name}h{host}", "route", "add", "blackhole", f"{self.address(other)}/32"],
                check=True,
            )
        run = self.doctor()
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        line = self.expect_one(
            run,
            "[LAUNCH] two ranks do not reach each other",
            f"who: rank 2 ({self.address(2)}) and rank 3 ({self.address(3)})",
        )
        self.assertIn(f"{self.address(3)}:", line)

    def test_a_host_that_does_not_reach_rank_zero(self) -> None:
        """ssh reaches it, rank 0's address does not answer."""
        subprocess.run(
            ["ip", "-n", f"{self.net.name}h3", "route", "add", "blackhole", f"{self.address(1)}/32"], check=True
        )
        run = self.doctor("--timeout", "20")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.expect_one(
            run,
            "[LAUNCH] a rank does not answer",
            f"where: {self.address(3)}; who: rank 3",
            f"to come to rank 0, {self.address(1)}:",
        )
        self.assertIn("rank 3: [TIMEOUT] nobody of this job answers", run.err)
        self.assertIn("\n  0-2       tcp   between ", run.out)

    def test_a_cable_that_is_cut_while_it_is_measured(self) -> None:
        """The host is there until then: what is known of the others is reported, and the lost one named."""
        self.net.throttle(3, "10mbit")
        run = self.doctor("--timeout", "60")
        sent = pathlib.Path(f"/sys/class/net/{self.net.name}v3/statistics/tx_bytes")
        end = time.monotonic() + LIMIT_S
        while int(sent.read_text()) < 150_000:  # of a meeting there are a few kB
            self.assertIsNone(run.process.poll(), run.out + run.err)
            self.assertLess(time.monotonic(), end)
            time.sleep(0.005)
        self.net.cut(3)
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.expect_one(run, "[LAUNCH] a rank does not answer", f"where: {self.address(3)}; who: rank 3")
        self.assertIn("\n  0-2       tcp   between ", run.out)


class DoctorOverMpi(Doctored):
    def test_links_of_mpi(self) -> None:
        program = (
            f"import os; os.execv({DOCTOR!r}, ['zeroth', 'doctor', '--no-disk', '--json', '--slow-below', '0.001'])"
        )
        library = ["-x", "ZEROTH_MPI_LIBRARY"]
        command = self.net.mpirun(os.environ["ZEROTH_MPIRUN"], 2, "-c", program, python=[sys.executable])
        at = command.index("-H")
        names = {name: "" for name in ("PYTHONPATH", "OMP_NUM_THREADS", "ZEROTH_BACKEND", "RANKS_PER_NODE")}
        run = Run(
            self.stage.folder,
            "mpi",
            [*command[:at], *library, *command[at:]],
            {**names, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        )
        self.assertEqual(run.code(LIMIT_S), 0, run.out + run.err)
        links = report(run)["links"]
        self.assertEqual(
            sorted((link["a"], link["b"], link["transport"], link["far"]) for link in links),
            sorted(
                [
                    (0, 1, "shm", False),
                    (2, 3, "shm", False),
                    (4, 5, "shm", False),
                    *((a, b, over, True) for a, b in ((0, 2), (0, 4), (2, 4)) for over in ("mpi", "tcp")),
                ]
            ),
        )
        self.assertEqual([link["error"] for link in links], [""] * len(links))


def main() -> int:
    reason = hosts.why_not()
    if not reason and shutil.which("tc") is None:
        reason = "not permitted: no tc"
    if not reason and "DoctorOverMpi" in sys.argv and "ZEROTH_MPIRUN" not in os.environ:
        reason = "no mpirun: the links of MPI"
    if reason:
        print(f"SKIPPED: {reason}")
        return 77
    return 0 if unittest.main(verbosity=2, exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
