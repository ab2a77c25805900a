"""`zeroth doctor` on one host: what it prints, what it finds, how it ends when something does not answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import unittest

import doctoring
import launching
from doctoring import DOCTOR, LIMIT_S, found, report
from launching import Run, Stage

# In place of ssh. The host "mute" never answers, "bad" refuses, and all others are this one.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2; shift 2
case $host in
  mute) exec sleep 1000 ;;
  bad) echo "no route to host" >&2; exit 255 ;;
esac
exec "$@"
"""


class Doctor(unittest.TestCase):
    def setUp(self) -> None:
        self.stage = Stage()
        self.stage.__enter__()
        self.addCleanup(self.stage.__exit__)

    def ssh(self) -> str:
        program = self.stage.folder / "ssh"
        program.write_text(SSH)
        program.chmod(0o755)
        return str(program)

    def over_hosts(self, hosts: str, *arguments: str, **environment: str) -> Run:
        return doctoring.run(
            self.stage,
            "--hosts",
            hosts,
            "--ssh",
            self.ssh(),
            "--remote-program",
            launching.RUN,
            *arguments,
            **environment,
        )

    def test_four_healthy_ranks(self) -> None:
        run = doctoring.run(self.stage, "-n", "4", "--params", "7e9", "--memory-gib", "500")
        self.assertEqual(run.code(LIMIT_S), 0, run.out + run.err)
        for text in (
            "(ranks 0, 1, 2, 3)",
            "versions      zeroth ",
            "memfd ok, pidfd ok",
            "open files ",
            "O_DIRECT",
            " 0-1       shm   inside ",
            "usual inside a host over shm: ",
            'proposed: zero-3, {"zero_optimization": {"stage": 3}}',
            "\nall well\n",
        ):
            self.assertIn(text, run.out)
        self.assertEqual(run.err, "")
        self.assertEqual(
            [path.name for path in self.stage.folder.iterdir() if "doctor-" in path.name],
            [],
            "nothing is left in the folder",
        )
        self.assertEqual(self.stage.left(), "")

    def test_the_report_for_programs(self) -> None:
        run = doctoring.run(self.stage, "-n", "4", "--json")
        self.assertEqual(run.code(LIMIT_S), 0, run.out + run.err)
        result = report(run)
        self.assertTrue(result["well"])
        self.assertEqual([facts["rank"] for facts in result["ranks"]], [0, 1, 2, 3])
        self.assertEqual(
            [(link["a"], link["b"], link["transport"]) for link in result["links"]],
            [(a, b, "shm") for a in range(4) for b in range(a + 1, 4)],
        )
        for link in result["links"]:
            self.assertGreater(min(link["latency_us"], link["there_bytes_per_s"], link["back_bytes_per_s"]), 0)
        self.assertEqual(len(result["disks"]), 1)

    def test_a_slow_link_and_a_wrong_version_are_both_named(self) -> None:
        run = doctoring.run(self.stage, "-n", "4", ZEROTH_DOCTOR_PRETEND="slow=1-3:2e6;version=2:0.0.9")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        lines = found(run)
        self.assertEqual(len(lines), 2, run.out)
        self.assertRegex(
            lines[0],
            r"^\[MISMATCH\] another Zeroth than elsewhere; where: \S+; who: rank 2; expected: \S+ as on most ranks; got: 0.0.9; hint: ",  # noqa: E501
        )
        self.assertRegex(
            lines[1],
            r"^\[ENVIRONMENT\] a link is slow; where: link over shm; who: ranks 1 and 3 on \S+; expected: [\d.]+ .B/s as usual here; "  # noqa: E501
            r"got: [\d.]+ [MK]?B/s from rank [13] to rank [13]",
        )
        self.assertRegex(run.out, r"\n  1-3 .* <- slow\n")
        self.assertIn("\n2 findings\n", run.out)

    def test_a_rank_that_does_not_come_is_named_in_time(self) -> None:
        begin = time.monotonic()
        run = doctoring.run(self.stage, "-n", "3", "--timeout", "12", ZEROTH_DOCTOR_PRETEND="silent=1")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        self.assertLess(time.monotonic() - begin, 40)
        self.assertRegex(
            found(run)[0],
            r"^\[LAUNCH\] a rank does not answer; who: rank 1; expected: to come to rank 0, 127.0.0.1:\d+; got: nothing for 3 s",  # noqa: E501
        )
        self.assertIn("(ranks 0, 2)", run.out)

    def test_every_failpoint_is_a_finding(self) -> None:
        listed = subprocess.run(
            [os.environ["ZEROTH_RUN"], "--list-failpoints"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        self.assertEqual(re.findall(r"^doctor\.(\w+)", listed, re.MULTILINE), ["ask", "answer"])
        for site, victims in (("ask", (0,)), ("answer", (0, 1, 2))):
            for victim in victims:
                for action in ("kill", "throw"):
                    rule = f"doctor.{site}@rank={victim},hit=2:{action}"
                    with self.subTest(rule):
                        run = doctoring.run(self.stage, "-n", "3", "--timeout", "20", ZEROTH_FAULTS=rule)
                        self.assertNotEqual(run.code(LIMIT_S), 0)
                        said = "\n".join(found(run)) + run.err
                        self.assertRegex(
                            said,
                            rf"rank {victim}\b"
                            if action == "kill"
                            else rf"planted failure at doctor\.{site}|missing rank {victim}\b",
                        )
                        self.assertEqual(self.stage.left(), "")

    def test_disks_that_are_full_or_not_there(self) -> None:
        run = Run(
            self.stage.folder, "full", [DOCTOR, "doctor", "-n", "1", "--disk-mib", "1", "--min-free-gib", "900000"], {}
        )
        self.assertEqual(run.code(LIMIT_S), 1)
        self.assertRegex(
            found(run)[0], r"^\[IO\] a disk is nearly full; where: \S+; which: \.; expected: .* free or more"
        )
        run = Run(self.stage.folder, "nowhere", [DOCTOR, "doctor", "-n", "1", "--folder", "/proc/nowhere"], {})
        self.assertEqual(run.code(LIMIT_S), 1)
        self.assertIn("[IO] a file cannot be written and read back", found(run)[0])
        self.assertIn("got: No such file or directory", found(run)[0])

    def test_hosts_that_cannot_take_part_are_named_and_the_others_examined(self) -> None:
        run = self.over_hosts("localhost:2,bad:1,mute:1,h2:1", "--connect-timeout", "4")
        self.assertEqual(run.code(LIMIT_S), 1, run.out + run.err)
        lines = found(run)
        self.assertRegex(lines[0], r"^\[LAUNCH\] a host cannot take part; where: bad; got: .*no route to host")
        self.assertRegex(lines[1], r"^\[LAUNCH\] a host cannot take part; where: mute; got: no answer for \d+ s")
        # Both names are this machine, which advertises loopback to them.
        self.assertTrue(
            any(
                "[LAUNCH] rank 0's host advertises loopback; who: rank 0; which: MASTER_ADDR" in line for line in lines
            ),
            run.out,
        )
        self.assertIn("host localhost", run.out)
        self.assertRegex(run.out, r"\n  0-2       tcp   between .*B/s .*B/s")

    def test_no_host_is_left(self) -> None:
        run = self.over_hosts("bad:1", "--connect-timeout", "4")
        self.assertEqual(run.code(LIMIT_S), 1)
        self.assertEqual(len(found(run)), 1, run.out)
        self.assertIn("where: bad", found(run)[0])

    def test_a_program_that_is_not_on_a_host_is_its_finding(self) -> None:
        run = doctoring.run(
            self.stage,
            "--hosts",
            "h1:1",
            "--ssh",
            self.ssh(),
            "--remote-program",
            "/nowhere/zeroth-run",
            "--connect-timeout",
            "4",
        )
        self.assertEqual(run.code(LIMIT_S), 1)
        self.assertRegex(found(run)[0], r"where: h1; got: .*/nowhere/zeroth-run")

    def test_nothing_is_left_when_it_is_killed(self) -> None:
        run = self.over_hosts("localhost:1,mute:1")
        run.wait_for("waiting for host mute", stream="err")
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        self.assertEqual(self.stage.left(10), "", "ranks or agents live on")

    def test_it_ends_when_its_time_is_over(self) -> None:
        begin = time.monotonic()
        run = self.over_hosts("localhost:1,mute:1", "--timeout", "3", "--connect-timeout", "2")
        self.assertEqual(run.code(LIMIT_S), 1)
        self.assertLess(time.monotonic() - begin, 40)
        self.assertIn("where: mute", found(run)[0])

    def test_command_lines_that_are_refused(self) -> None:
        for arguments, words in (
            (["nurse"], "there is no such thing to do"),
            (["doctor", "-n", "0"], "1 to 128"),
            (["doctor", "--hosts", "a:x"], "--hosts:1:3"),
            (["doctor", "--params", "few"], "--params"),
            ([], "nothing to do"),
        ):
            done = subprocess.run([DOCTOR, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S)
            self.assertEqual((done.returncode, done.stdout), (64, ""), done.stderr)
            self.assertRegex(done.stderr, r"^zeroth: \[USAGE\] .*\n$")
            self.assertIn(words, done.stderr)
        done = subprocess.run(
            [DOCTOR, "doctor"],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, "ZEROTH_DOCTOR_PRETEND": "nonsense", "RANK": "0", "WORLD_SIZE": "1"},
        )
        self.assertEqual(done.returncode, 77)
        self.assertIn("ZEROTH_DOCTOR_PRETEND", done.stderr)

    def test_ranks_of_zeroth_run_and_of_mpirun(self) -> None:
        starts = [[launching.RUN, "-q", "--no-prefix", "-n", "2"]]
        if mpirun := os.environ.get("ZEROTH_MPIRUN"):
            starts.append([mpirun, "--oversubscribe", "--bind-to", "none", "-n", "2"])
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        for start in starts:
            run = doctoring.run(self.stage, prefix=start, **allowed)
            self.assertEqual(run.code(LIMIT_S), 0, run.out + run.err)
            self.assertIn("(ranks 0, 1)", run.out)
            self.assertIn("  0-1       shm   inside ", run.out)


if __name__ == "__main__":
    sys.exit(0 if unittest.main(verbosity=2, exit=False).result.wasSuccessful() else 1)
