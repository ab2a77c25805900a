"""One rank keeps the others waiting. Every rank is told who, where and in which call, over every transport: the cases
of which other systems say nothing, or too little, or nothing at all for half an hour. All jobs sleep most of the time,
and run side by side. tests/process/faults_test.cpp has the whole table of faults; here are those that Python makes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import forked
import job
import mpi_test
import ports
import tier

MPI = bool(os.environ.get("ZEROTH_MPIRUN"))
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


@dataclasses.dataclass(frozen=True)
class Case:
    """Rank 1 misbehaves at step 3, after which nothing of the job is left."""

    how: str
    transport: str
    timeout_ms: int = 60_000
    faults: str = ""
    """ZEROTH_FAULTS"""
    alone: bool = False
    """no launcher ends the others before they have found out by themselves; then its exit code says nothing"""
    each_code: bool = False
    """ "rank 1 ends with 76" in its output, for every rank; with `alone` only"""
    traces: bool = False
    stage: int = 3

    def run(self, folder: str) -> subprocess.CompletedProcess[str]:
        variables = {"ZEROTH_FAULTS": self.faults} if self.faults else {}
        if self.traces:
            variables["ZEROTH_TRACE_DIR"] = self.trace_folder(folder)
            pathlib.Path(self.trace_folder(folder)).mkdir()
        # What kill_parent() has forked lives as long as its launcher.
        python = [sys.executable] if self.how == "kill_parent" else forked.python()
        arguments = [self.how, self.transport, str(self.stage), str(self.timeout_ms)]
        program = [*(SAYS_ITS_CODE if self.each_code else []), *python, str(job.HERE / "waits_rank.py"), *arguments]
        environment = {**os.environ, **variables}
        if self.transport in ("mpi", "shm+mpi"):
            environment = mpi_test.variables(ZEROTH_BACKEND=self.transport, **variables)
            recovery = ["--enable-recovery"] if self.alone else []
            command = [*mpi_test.MPIRUN, *recovery, "-n", str(1 + len(others(self.transport))), *program]
        elif self.alone:
            world = {
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports.free_port()),
            }
            environment = mpi_test.variables(**world, **variables)
            command = [
                "sh",
                "-c",
                'for RANK in 0 1 2; do RANK=$RANK LOCAL_RANK=$RANK "$@" & done; wait',
                "sh",
                *program,
            ]
        else:
            command = job.command(RANKS, "waits_rank.py", *arguments)
        with job.Family(command, environment, beside=True) as family:
            return family.end(180)

    def trace_folder(self, folder: str) -> str:
        return str(pathlib.Path(folder, self.transport))


WITHOUT_LEVELS, ALL = ("shm", "gloo", "mpi"), ("shm", "gloo", "mpi", "shm+mpi")
EVERY: dict[str, list[Case]] = {
    "hangs": [
        Case("load_batch", "shm", 4_000),
        Case("tokenize", "shm", 4_000, stage=0),
        *(Case("native_code", transport, 4_000) for transport in WITHOUT_LEVELS),
    ],
    "sleeps with the GIL": [Case("native_code", "shm", 3_000, alone=True)],
    "traces": [Case("load_batch", transport, 2_000, traces=True) for transport in ("gloo", "shm")],
    "stopped": [Case("stop", transport) for transport in ALL],
    "alone": [Case(how, transport) for transport in WITHOUT_LEVELS for how in ("export_alone", "average_alone")],
    "averages": [Case(how, transport) for transport in ALL for how in ("swap_averages", "skip_average")],
    "evaluation": [Case("evaluate_alone", transport) for transport in WITHOUT_LEVELS],
    "skips": [Case("skip_step", transport) for transport in ALL],
    "leaves": [Case("leave", transport, alone="mpi" in transport) for transport in ALL],
    "says how it ends": [
        Case(how, transport, alone=True)
        for transport in WITHOUT_LEVELS
        for how in ("exit_code", "exit_text", "interrupt", "caught")
    ],
    "leaves before": [Case("leave_before_evaluation", "gloo")],
    "raises": [Case(how, transport, alone=True, each_code=True) for transport in ALL for how in ("raise", "refuse")],
    "stops the job": [Case("abort", transport, alone=True) for transport in ALL],
    # mpirun by default kills the others before they can speak: see mpi_test.py for what it says itself.
    "killed": [Case("kill", "gloo", alone=True)],
    "killed with a child": [Case("kill_parent", transport, alone=True) for transport in ALL[1:]],
    # Between the agreement about a call and its data, of each kind that a training makes; over MPI mpi_failpoints_test
    # does it.
    "killed inside": [
        Case("nothing", "gloo", alone=True, faults=f"messages.{call}.mid@rank=1,hit=8:kill")
        for call in ("all_gather", "reduce_scatter", "all_reduce", "barrier")
    ],
    "parameters": [Case("parameters", transport) for transport in ALL[1:]],
}
FEW: dict[str, set[tuple[str, str]]] = {
    "hangs": {("tokenize", "shm"), ("native_code", "gloo"), ("native_code", "mpi")},
    "sleeps with the GIL": {("native_code", "shm")},
    "traces": {("load_batch", "gloo")},
    "stopped": {("stop", "shm"), ("stop", "shm+mpi")},
    "alone": {("export_alone", "shm"), ("average_alone", "mpi")},
    "averages": {("swap_averages", "shm"), ("skip_average", "gloo")},
    "evaluation": {("evaluate_alone", "shm"), ("evaluate_alone", "gloo")},
    "skips": {("skip_step", "shm"), ("skip_step", "shm+mpi")},
    "leaves": {("leave", "shm"), ("leave", "gloo")},
    "says how it ends": {("exit_code", "shm"), ("exit_text", "gloo"), ("interrupt", "shm"), ("caught", "gloo")},
    "leaves before": {("leave_before_evaluation", "gloo")},
    "raises": {("refuse", "shm"), ("raise", "gloo")},
    "stops the job": {("abort", "gloo")},
    "killed": {("kill", "gloo")},
    "killed with a child": set(),
    "killed inside": {("nothing", "gloo")},
    "parameters": {("parameters", "gloo")},
}
"""how and over what in `make test`: every case and every transport, and what Python alone can do wrong"""


def cases(of: str) -> list[Case]:
    """In this tier, here."""
    few = [case for case in EVERY[of] if (case.how, case.transport) in FEW[of]]
    if of == "killed inside":
        few = few[:1]
    return [case for case in tier.rows(EVERY[of], few) if MPI or "mpi" not in case.transport]


class Waits(unittest.TestCase):
    jobs: dict[Case, concurrent.futures.Future[subprocess.CompletedProcess[str]]]
    folder: str

    @classmethod
    def setUpClass(cls) -> None:
        """Starts all jobs, the longest first."""
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        pool = concurrent.futures.ThreadPoolExecutor(8)
        cls.addClassCleanup(pool.shutdown, cancel_futures=True)
        forked.python()  # started by this thread
        every = dict.fromkeys(case for of in EVERY for case in cases(of))
        cls.jobs = {case: pool.submit(case.run, cls.folder) for case in every}

    def ended(self, case: Case) -> subprocess.CompletedProcess[str]:
        return self.jobs[case].result()

    def told(self, done: subprocess.CompletedProcess[str], rank: int) -> tuple[float, str]:
        """After how many seconds, and what."""
        found = re.search(rf"rank {rank} is told after (\d+\.\d) s: (.*)", done.stdout)
        self.assertIsNotNone(found, done.stdout + done.stderr)
        assert found is not None
        return float(found[1]), found[2]

    @tier.both
    def test_a_rank_that_hangs_is_named_with_its_line(self) -> None:
        for case in cases("hangs"):
            with self.subTest(case):
                done = self.ended(case)
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                place = (
                    rf"rank 1 \(pid \d+ on .*\) is between steps, after step 3, at .*waits_rank\.py:\d+ in {case.how}"
                )
                # At a quarter of the deadline, once, from rank 0; at the deadline on every other rank.
                warned = re.findall(rf"warning: {place}.*ranks 0, 2 wait for .*for \d\.\d s of 4\.0 s", done.stderr)
                self.assertEqual(len(warned), 1, done.stderr)
                for rank in (0, 2):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(
                        text,
                        rf"\[TIMEOUT\] no answer within 4\.0 s: {place}.*ranks 0, 2 wait for .* at .*waits_rank\.py:\d+ in train",  # noqa: E501
                    )
                    self.assertLess(seconds, 4.0 + 6.0)  # the promise is 2 s; two cores are busy

    def test_a_rank_that_sleeps_with_the_gil_ends_by_itself(self) -> None:
        (case,) = cases("sleeps with the GIL")
        done = self.ended(case)  # no launcher ends it
        line = r"ZEROTH ERROR \[TIMEOUT\] no answer within 3\.0 s: rank 1 \(pid \d+ on .*\) is between steps, after step 3, at .*waits_rank\.py:\d+ in native_code"  # noqa: E501
        self.assertEqual(len(re.findall(line, done.stderr)), 1, done.stderr)
        self.assertRegex(
            done.stderr, r"rank 1/3 has not come to a call of Zeroth for [1-9]\.\d s since then, and is ended"
        )
        for rank in (0, 2):
            self.told(done, rank)

    @tier.both
    def test_traces_show_where_ranks_part(self) -> None:
        for case in cases("traces"):
            with self.subTest(case):
                self.ended(case)
                self.trace(case.transport, case.trace_folder(self.folder))

    def trace(self, transport: str, folder: str) -> None:
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
            with job.Family([command[0], "--log-dir", folder, *command[1:]], beside=True) as family:
                done = family.end(180)
            found = re.search(r"; details: (\S+/trace-rank1\.jsonl)\.\n$", done.stderr)
            self.assertIsNotNone(found, done.stderr)
            assert found is not None
            failure = json.loads(pathlib.Path(found[1]).read_text().splitlines()[0])["failure"]
        self.assertIn("rank 1 stopped the job: [USER] ValueError: a mistake of the user's", failure["message"])
        self.assertEqual(failure["rank_was"], "is between steps, after step 3")

    @tier.both
    def test_a_rank_that_is_stopped_is_named(self) -> None:
        for case in cases("stopped"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(
                        text, r"\[PEER_LOST\] rank 1\b.*(is frozen: no heartbeat|has given no sign of life)"
                    )
                    self.assertLess(seconds, 15.0)

    @tier.both
    def test_calls_that_one_rank_makes_alone_are_named(self) -> None:
        calls = {"export_alone": "an export", "average_alone": r"average\(\)"}
        for case in cases("alone"):
            with self.subTest(case):
                done = self.ended(case)
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in (0, 2):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(text, r"\[MISMATCH\]|\[ABORTED\] .*\[MISMATCH\]")
                    self.assertRegex(text, calls[case.how])
                    self.assertRegex(text, r"\brank 1\b")
                    self.assertLess(seconds, 45.0)  # the loss ended the wait, not the limit of 60 s

    @tier.both
    def test_averages_that_one_rank_swaps_or_skips_are_named(self) -> None:
        for case in cases("averages"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in range(1 + len(others(transport))):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(
                        text,
                        r'^\[MISMATCH\] ranks make different calls.*"the (loss|accuracy)".*"the (?!\1)(loss|accuracy)"',  # noqa: E501
                    )
                    self.assertRegex(text, r"average\(\) on rank \d, average\(\) on rank \d")
                    self.assertLess(seconds, 45.0)  # the loss ended the wait, not the limit of 60 s

    @tier.both
    def test_an_evaluation_on_one_rank_works_over_shared_memory_and_is_named_elsewhere(self) -> None:
        for case in cases("evaluation"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                if transport == "shm":  # parameters are read where they lie: nobody else has to take part
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertEqual(done.stdout.count("has trained"), RANKS)
                    continue
                for rank in range(RANKS):
                    _, text = self.told(done, rank)
                    self.assertRegex(text, r"\[MISMATCH\] ranks make different calls.*the parameters of unit")

    @tier.both
    def test_a_step_that_one_rank_skips_is_named(self) -> None:
        for case in cases("skips"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                if transport == "shm":  # the others need not take part: the step takes both batches, and says so
                    self.assertRegex(done.stderr, r"warning: rank 1 ran 2 backwards in step 4, rank 0 ran 1")
                    continue
                self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(text, r"\[(MISMATCH|PEER_LOST)\]")
                    self.assertRegex(text, r"\brank 1\b")
                    self.assertLess(seconds, 45.0)  # the loss ended the wait, not the limit of 60 s

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
            self.assertLess(seconds, 45.0)  # the loss ended the wait, not the limit of 60 s

    @tier.both
    def test_a_rank_that_leaves_is_named(self) -> None:
        for case in cases("leaves"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                if not case.alone:  # mpirun itself ends the job once the first of the others has
                    self.assertEqual(done.returncode, SEEN_OF_OTHERS, done.stderr)
                self.lost(done, transport, LEFT)

    @tier.both
    def test_a_rank_that_ends_with_a_code_or_an_interrupt_says_so(self) -> None:
        place = r" at \S*waits_rank\.py:\d+ in misbehave"
        ends = {
            "exit_code": rf"sys\.exit\(7\){place}",
            "exit_text": rf'sys\.exit\("bye"\){place}',
            "interrupt": f"KeyboardInterrupt{place}",
            "caught": r"an exit after the script had caught \[\w+\] .*optimizer has no state_dict.*",
        }
        for case in cases("says how it ends"):
            with self.subTest(case):
                done = self.ended(case)
                how = rf"left early: it ended by {ends[case.how]}, after 3 steps"
                self.lost(done, case.transport, how)
                self.assertNotIn("unequal batch counts", done.stdout)

    def test_a_rank_that_leaves_before_an_evaluation_has_no_fewer_batches(self) -> None:
        (case,) = cases("leaves before")
        done = self.ended(case)
        for rank in others("gloo"):
            _, text = self.told(done, rank)
            self.assertRegex(
                text,
                r"rank 1 .*left early: it ended after 3 steps, while rank \d is in a forward without gradients of unit root, after step 3: a call that only",  # noqa: E501
            )
            self.assertNotIn("batch", text)
            self.assertRegex(done.stdout, rf"(?m)^(\[\d\] )?rank {rank} knows PEER_LOST {rank} 3 all_gather#\d+$")

    @tier.both
    def test_a_rank_that_raises_is_named(self) -> None:
        endings = {
            "raise": (r"\[USER\] ValueError: a mistake of the user's; where: \S*waits_rank\.py:\d+ in misbehave", 1),
            "refuse": (
                r"\[USAGE\] the scale is not a number; where: train\.py at \S*waits_rank\.py:\d+ in misbehave; .*hint: take one",  # noqa: E501
                64,
            ),
        }
        for case in cases("raises"):
            how, transport = case.how, case.transport
            what, code = endings[how]
            with self.subTest(case):
                done = self.ended(case)
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

    @tier.both
    def test_a_rank_that_stops_the_job_is_heard_while_it_lives(self) -> None:
        for case in cases("stops the job"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
                for rank in others(transport):
                    seconds, text = self.told(done, rank)
                    self.assertRegex(text, r"\[ABORTED\] .*rank 1\b.*the data set has ended")
                    self.assertLess(seconds, 6.0)  # the promise is 2 s; two cores are busy, and after 8 s rank 1 leaves

    def test_a_rank_that_is_killed_is_named(self) -> None:
        for case in cases("killed"):
            self.lost(self.ended(case), "gloo", r"\(pid \d+ on .*\) was killed by SIGKILL \(signal 9\)")

    @tier.long
    def test_a_rank_that_is_killed_and_whose_child_lives_is_named(self) -> None:
        # A child keeps what it has of its parent's connections, gloo's and MPI's among them: only those of the control
        # plane end.
        for case in cases("killed with a child"):
            with self.subTest(case):
                self.lost(self.ended(case), case.transport, r"was killed by SIGKILL \(signal 9\)")

    @tier.both
    def test_a_rank_that_is_killed_inside_a_call_ends_all(self) -> None:
        for case in cases("killed inside"):
            with self.subTest(case):
                done = self.ended(case)
                told = [self.told(done, rank)[1] for rank in (0, 2)]
                for text in told:
                    self.assertRegex(text, r"\[PEER_LOST\] (torch's group lost )?rank \d\b")
                # Who waits for a survivor may see its end before it hears of the victim: gloo's error does not wait for
                # the control plane.
                self.assertTrue(
                    any(re.search(r"\[PEER_LOST\] (torch's group lost )?rank 1\b", text) for text in told), told
                )

    @tier.both
    def test_a_parameter_that_one_rank_has_otherwise_is_named(self) -> None:
        for case in cases("parameters"):
            transport = case.transport
            with self.subTest(case):
                done = self.ended(case)
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
    tier.main()
