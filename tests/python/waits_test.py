"""One rank keeps the others waiting. Every rank is told who, where and in which call, over every transport: the cases
of which other systems say nothing, or too little, or nothing at all for half an hour."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping

import forked
import job
import mpi_test

MPI = bool(os.environ.get("ZEROTH_MPIRUN"))
TRANSPORTS = ["shm", "gloo", *(["mpi"] if MPI else [])]
BETWEEN_HOSTS = ["gloo", *(["mpi", "shm+mpi"] if MPI else [])]
RANKS = 3
LEFT = r"left early: it ended after 3 steps, while rank \d is in the (forward|backward) of unit \S+ of step 4: unequal batch counts\?.*engine\.batches\(loader\)"  # noqa: E501
SEEN_OF_OTHERS = 76
"""exit code of whoever ends because of another rank"""
SAYS_ITS_CODE = [
    "sh",
    "-c",
    '"$@"; code=$?; echo "rank ${RANK-$OMPI_COMM_WORLD_RANK} ends with $code"; exit $code',
    "sh",
]


def others(transport: str) -> list[int]:
    """Over two levels there are two nodes of two ranks."""
    return [0, 2, 3] if transport == "shm+mpi" else [0, 2]


def run(
    how: str,
    transport: str,
    stage: int = 3,
    timeout_ms: int = 60_000,
    environment_of_test: Mapping[str, str] | None = None,
    alone: bool = False,
    each_code: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Rank 1 misbehaves at step 3, after which nothing of the job is left. `alone`: no launcher ends the others before
    they have found out by themselves; then its exit code says nothing. `each_code`: "rank 1 ends with 76" in its
    output, for every rank; with `alone` only."""
    program = [
        *(SAYS_ITS_CODE if each_code else []),
        *forked.python(),
        str(job.HERE / "waits_rank.py"),
        how,
        transport,
        str(stage),
        str(timeout_ms),
    ]
    environment = {**os.environ, **(environment_of_test or {})}
    if transport in ("mpi", "shm+mpi"):
        environment = mpi_test.variables(ZEROTH_BACKEND=transport, **(environment_of_test or {}))
        command = [
            *mpi_test.MPIRUN,
            *(["--enable-recovery"] if alone else []),
            "-n",
            str(1 + len(others(transport))),
            *program,
        ]
    elif alone:
        world = {
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job.free_port()),
        }
        environment = mpi_test.variables(**world, **(environment_of_test or {}))
        command = ["sh", "-c", 'for RANK in 0 1 2; do RANK=$RANK LOCAL_RANK=$RANK "$@" & done; wait', "sh", *program]
    else:
        command = job.command(RANKS, "waits_rank.py", how, transport, str(stage), str(timeout_ms))
    with job.Family(command, environment) as family:
        return family.end(180)


class Waits(unittest.TestCase):
    def told(self, done: subprocess.CompletedProcess[str], rank: int) -> tuple[float, str]:
        """After how many seconds, and what."""
        found = re.search(rf"rank {rank} is told after (\d+\.\d) s: (.*)", done.stdout)
        self.assertIsNotNone(found, done.stdout + done.stderr)
        assert found is not None
        return float(found[1]), found[2]

    def test_a_rank_that_hangs_is_named_with_its_line(self) -> None:
        for transport in TRANSPORTS:
            for how in ("load_batch", "tokenize", "native_code") if transport == "shm" else ("native_code",):
                with self.subTest(transport=transport, how=how):
                    done = run(how, transport, timeout_ms=4_000)
                    self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                    place = (
                        rf"rank 1 \(pid \d+ on .*\) is between steps, after step 3, at .*waits_rank\.py:\d+ in {how}"
                    )
                    # At a quarter of the deadline, once, from rank 0; at the deadline on every other rank.
                    self.assertEqual(
                        len(
                            re.findall(rf"warning: {place}.*ranks 0, 2 wait for .*for \d\.\d s of 4\.0 s", done.stderr)
                        ),
                        1,
                        done.stderr,
                    )
                    for rank in (0, 2):
                        seconds, text = self.told(done, rank)
                        self.assertRegex(
                            text,
                            rf"\[TIMEOUT\] no answer within 4\.0 s: {place}.*ranks 0, 2 wait for .*unit .* at .*waits_rank\.py:\d+ in train",  # noqa: E501
                        )
                        self.assertLess(seconds, 4.0 + 6.0)  # the promise is 2 s; two cores are busy

    def test_a_rank_that_sleeps_with_the_gil_ends_by_itself(self) -> None:
        done = run("native_code", "shm", timeout_ms=3_000, alone=True)  # no launcher ends it
        line = r"ZEROTH ERROR \[TIMEOUT\] no answer within 3\.0 s: rank 1 \(pid \d+ on .*\) is between steps, after step 3, at .*waits_rank\.py:\d+ in native_code"  # noqa: E501
        self.assertEqual(len(re.findall(line, done.stderr)), 1, done.stderr)
        self.assertRegex(
            done.stderr, r"rank 1/3 has not come to a call of Zeroth for [1-9]\.\d s since then, and is ended"
        )
        for rank in (0, 2):
            self.told(done, rank)

    def test_traces_show_where_ranks_part(self) -> None:
        for transport in ("gloo", "shm"):
            with self.subTest(transport=transport):
                self.trace(transport)

    def trace(self, transport: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run("load_batch", transport, timeout_ms=2_000, environment_of_test={"ZEROTH_TRACE_DIR": folder})
            files = sorted(path.name for path in pathlib.Path(folder).iterdir())
            self.assertEqual(files, [f"trace-rank{rank}.jsonl" for rank in range(RANKS)])
            tool = str(pathlib.Path(os.environ["ZEROTH_RUN"]).with_name("zeroth-trace"))
            record = json.loads(pathlib.Path(folder, "trace-rank2.jsonl").read_text().splitlines()[0])
            done = subprocess.run(
                [tool, folder, "--seconds", "10"], capture_output=True, text=True, timeout=60, check=False
            )
            pathlib.Path(folder, "trace-rank9.jsonl").touch()
            wrong = subprocess.run([tool, folder], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(
            (record["rank"], record["failure"]["code"], record["failure"]["steps"]), (2, "TIMEOUT", "3"), record
        )
        self.assertRegex(record["failure"]["message"], "rank 1 .* in load_batch")
        self.assertTrue(record["failure"]["waited_for"] and record["failure"]["group"], record)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^3 of 3 ranks; the last 10 s$")
        call = (
            r"wait#\d+ \((a bucket slot held by unit blocks\.2|step\(\) of all ranks)\)"
            if transport == "shm"
            else r"\w+#\d+ \(the parameters of unit \w+\)"
        )
        self.assertRegex(done.stdout, rf"(?m)^rank 0 .*>\| in {call} of world/engine0 for \d\.\d s$")
        self.assertRegex(done.stdout, r"(?m)^rank 1 .*\.\| last all_reduce#\d+ of world/engine0, \d\.\d s before$")
        if transport != "shm":
            self.assertRegex(
                done.stdout,
                r"(?m)^world/engine0#\d+: ranks 0, 2 have begun .* \(the parameters of unit \w+\), rank 1 has not$",
            )
        self.assertEqual(wrong.returncode, 74)
        self.assertRegex(wrong.stderr, r"ZEROTH ERROR \[IO\] the trace is empty")

    def test_the_launcher_names_a_record_of_the_rank_that_failed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = job.command(RANKS, "waits_rank.py", "raise", "shm", "3", "60000")
            with job.Family([command[0], "--log-dir", folder, *command[1:]]) as family:
                done = family.end(180)
            found = re.search(r"; details: (\S+/trace-rank1\.jsonl)\.\n$", done.stderr)
            self.assertIsNotNone(found, done.stderr)
            assert found is not None
            failure = json.loads(pathlib.Path(found[1]).read_text().splitlines()[0])["failure"]
        self.assertIn("rank 1 stopped the job: [USER] ValueError: a mistake of the user's", failure["message"])
        self.assertEqual(failure["rank_was"], "is between steps, after step 3")

    def test_a_rank_that_is_stopped_is_named(self) -> None:
        for transport in ("shm", *BETWEEN_HOSTS):
            with self.subTest(transport=transport):
                done = run("stop", transport)
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(
                        text, r"\[PEER_LOST\] rank 1\b.*(is frozen: no heartbeat|has given no sign of life)"
                    )
                    self.assertLess(seconds, 15.0)

    def test_calls_that_one_rank_makes_alone_are_named(self) -> None:
        cases = {"export_alone": "an export", "average_alone": r"average\(\)"}
        for transport in TRANSPORTS:
            for how, call in cases.items():
                with self.subTest(transport=transport, how=how):
                    done = run(how, transport)
                    self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                    for rank in (0, 2):
                        seconds, text = self.told(done, rank)
                        self.assertRegex(text, r"\[MISMATCH\]|\[ABORTED\] .*\[MISMATCH\]")
                        self.assertRegex(text, call)
                        self.assertRegex(text, r"\brank 1\b")
                        self.assertLess(seconds, 10.0)

    def test_averages_that_one_rank_swaps_or_skips_are_named(self) -> None:
        for transport in ("shm", *BETWEEN_HOSTS):
            for how in ("swap_averages", "skip_average"):
                with self.subTest(transport=transport, how=how):
                    done = run(how, transport)
                    self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                    for rank in range(1 + len(others(transport))):
                        seconds, text = self.told(done, rank)
                        self.assertRegex(
                            text,
                            r'^\[MISMATCH\] ranks make different calls.*"the (loss|accuracy)".*"the (?!\1)(loss|accuracy)"',  # noqa: E501
                        )
                        self.assertRegex(text, r"average\(\) on rank \d, average\(\) on rank \d")
                        self.assertLess(seconds, 10.0)

    def test_an_evaluation_on_one_rank_works_over_shared_memory_and_is_named_elsewhere(self) -> None:
        for transport in TRANSPORTS:
            with self.subTest(transport=transport):
                done = run("evaluate_alone", transport)
                if transport == "shm":  # parameters are read where they lie: nobody else has to take part
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertEqual(done.stdout.count("has trained"), RANKS)
                    continue
                for rank in range(RANKS):
                    _, text = self.told(done, rank)
                    self.assertRegex(text, r"\[MISMATCH\] ranks make different calls.*the parameters of unit")

    def test_a_step_that_one_rank_skips_is_named(self) -> None:
        for transport in ("shm", *BETWEEN_HOSTS):
            with self.subTest(transport=transport):
                done = run("skip_step", transport)
                if transport == "shm":  # the others need not take part: the step takes both batches, and says so
                    self.assertRegex(done.stderr, r"warning: rank 1 ran 2 backwards in step 4, rank 0 ran 1")
                    continue
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(text, r"\[(MISMATCH|PEER_LOST)\]")
                    self.assertRegex(text, r"\brank 1\b")
                    self.assertLess(seconds, 10.0)

    def lost(self, done: subprocess.CompletedProcess[str], transport: str, how: str) -> None:
        """Every other rank says that rank 1 is lost, `how` (a pattern), and for what it has waited."""
        awaited = (
            r"a bucket slot held by unit blocks\.2|step\(\) of all ranks"
            if transport == "shm"
            else "the parameters of unit root"
        )
        for rank in others(transport):
            seconds, text = self.told(done, rank)
            self.assertRegex(text, rf"\[PEER_LOST\] (torch's group lost )?rank 1\b.*({how})")
            self.assertRegex(text, awaited)
            self.assertRegex(text, rf"\bwho: rank {rank}/")
            self.assertLess(seconds, 10.0)

    def test_a_rank_that_leaves_is_named(self) -> None:
        for transport in ("shm", *BETWEEN_HOSTS):
            with self.subTest(transport=transport):
                alone = "mpi" in transport  # mpirun itself ends the job once the first of the others has
                done = run("leave", transport, alone=alone)
                if not alone:
                    self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                self.lost(done, transport, LEFT)

    def test_a_rank_that_leaves_before_an_evaluation_has_no_fewer_batches(self) -> None:
        done = run("leave_before_evaluation", "gloo")
        for rank in others("gloo"):
            _, text = self.told(done, rank)
            self.assertRegex(
                text,
                r"rank 1 .*left early: it ended after 3 steps, while rank \d is in a forward without gradients of unit root, after step 3: a call that only",  # noqa: E501
            )
            self.assertNotIn("batch", text)
            self.assertRegex(done.stdout, rf"(?m)^(\[\d\] )?rank {rank} knows PEER_LOST {rank} 3 all_gather#\d+$")

    def test_a_rank_that_raises_is_named(self) -> None:
        cases = {
            "raise": (r"\[USER\] ValueError: a mistake of the user's; where: \S*waits_rank\.py:\d+ in misbehave", 1),
            "refuse": (
                r"\[USAGE\] the scale is not a number; where: train\.py at \S*waits_rank\.py:\d+ in misbehave; .*hint: take one",  # noqa: E501
                64,
            ),
        }
        for transport in ("shm", *BETWEEN_HOSTS):
            for how, (what, code) in cases.items():
                with self.subTest(transport=transport, how=how):
                    done = run(how, transport, alone=True, each_code=True)
                    self.assertEqual(
                        done.stderr.count("a mistake of the user's\n" if how == "raise" else "zeroth.Error: [USAGE]"),
                        1,
                        done.stderr,
                    )
                    for rank in others(transport):
                        seconds, text = self.told(done, rank)
                        self.assertRegex(text, rf"^\[ABORTED\] rank 1 stopped the job: {what}")
                        self.assertLess(seconds, 5.0)  # the promise is 2 s; two cores are busy
                    codes = {rank: int(found) for rank, found in re.findall(r"rank (\d) ends with (\d+)", done.stdout)}
                    self.assertEqual(
                        codes, {"1": code, **{str(rank): SEEN_OF_OTHERS for rank in others(transport)}}, done.stdout
                    )

    def test_a_rank_that_stops_the_job_is_heard_while_it_lives(self) -> None:
        for transport in ("shm", *BETWEEN_HOSTS):
            with self.subTest(transport=transport):
                done = run("abort", transport, alone=True)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(text, r"\[ABORTED\] .*rank 1\b.*the data set has ended")
                    self.assertLess(seconds, 6.0)  # the promise is 2 s; two cores are busy, and after 8 s rank 1 leaves

    def test_a_rank_that_is_killed_is_named(self) -> None:
        # mpirun by default kills the others before they can speak: see mpi_test.py for what it says itself.
        self.lost(run("kill", "gloo", alone=True), "gloo", r"\(pid \d+ on .*\) was killed by SIGKILL \(signal 9\)")
        # A child keeps what it has of its parent's connections, gloo's and MPI's among them: only those of the control
        # plane end.
        for transport in BETWEEN_HOSTS:
            with self.subTest(transport=transport):
                self.lost(run("kill_parent", transport, alone=True), transport, r"was killed by SIGKILL \(signal 9\)")

    def test_a_rank_that_is_killed_inside_a_call_ends_all(self) -> None:
        # Between the agreement about a call and its data, of each kind that a training makes; over MPI
        # mpi_failpoints_test does it.
        for call in ("all_gather", "reduce_scatter", "all_reduce", "barrier"):
            with self.subTest(call=call):
                done = run(
                    "nothing",
                    "gloo",
                    alone=True,
                    environment_of_test={"ZEROTH_FAULTS": f"messages.{call}.mid@rank=1,hit=8:kill"},
                )
                told = [self.told(done, rank)[1] for rank in (0, 2)]
                for text in told:
                    self.assertRegex(text, r"\[PEER_LOST\] (torch's group lost )?rank \d\b")
                # Who waits for a survivor may see its end before it hears of the victim: gloo's error does not wait for
                # the control plane.
                self.assertTrue(
                    any(re.search(r"\[PEER_LOST\] (torch's group lost )?rank 1\b", text) for text in told), told
                )

    def test_a_parameter_that_one_rank_has_otherwise_is_named(self) -> None:
        for transport in BETWEEN_HOSTS:
            with self.subTest(transport=transport):
                done = run("parameters", transport)
                self.assertEqual(done.returncode, 0)
                for rank in range(1 + len(others(transport))):
                    self.assertRegex(
                        done.stdout,
                        rf"rank {rank} is told of widths: \[MISMATCH\] ranks do not train the same thing.*who: rank 1/.*"  # noqa: E501
                        r"parameter head\.weight float64 \[5, 12\] .*\(rank 0\).*\[6, 12\] .*\(rank 1\)",
                    )
                    self.assertRegex(
                        done.stdout,
                        rf"rank {rank} goes on: non-finite gradient: parameter blocks\.1\.linear\.weight, rank 1, micro-step 0, "  # noqa: E501
                        "144 elements",
                    )
                    self.assertIn(f"rank {rank} has trained\n", done.stdout)  # a bias that it leaves out counts as zero


if __name__ == "__main__":
    unittest.main()
