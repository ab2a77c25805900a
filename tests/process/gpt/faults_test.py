#!/usr/bin/env python3
"""zeroth-run with three ranks of zeroth-gpt that are killed, frozen and interrupted while they start and while they
train.

usage: faults_test.py ZEROTH_RUN ZEROTH_GPT

Whatever happens, the job ends by itself soon, with the right exit code, a last line that names rank and signal, and
nothing left. When exactly a signal comes is drawn from a seed that every failure prints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

for folder in ("support", "python"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / folder))
import left_behind  # noqa: E402
import tier  # noqa: E402

RUN, GPT = sys.argv[1:3]
RANKS = 3
MODEL = [
    "--layers",
    "3",
    "--d-model",
    "32",
    "--heads",
    "2",
    "--seq",
    "32",
    "--batch",
    "2",
    "--eval-windows",
    "0",
    "--no-train-table",
    "--log-every",
    "0",
]
WORDS = "def return if else for in while class import from self none true false".split()
PEER_LOST = 76  # exit code, of a timeout as well

# Promised are two seconds from when the failure is noticed. This is long enough for a busy machine, and well below
# every timeout that the job itself has: who needs longer has hung.
ENDS_WITHIN_S = 20.0
TIMEOUT_MS = 120_000
FROZEN_AFTER_MS = 500


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When to strike: a random time of at most `spread_s` after step `step` was recorded; 0: after all ranks were
    started."""

    name: str
    step: int
    spread_s: float


STARTING = Moment(name="starting", step=0, spread_s=0.5)
FIRST_STEPS = Moment(name="first steps", step=1, spread_s=0.02)
LATER = Moment(name="later", step=25, spread_s=0.05)
MOMENTS = (STARTING, FIRST_STEPS, LATER)


@dataclasses.dataclass(kw_only=True, slots=True)
class Job:
    """A job that has been struck and has ended."""

    exit_code: int
    victim: int
    pid: int
    """Of the victim."""
    stderr: str
    output: str
    """All that is worth printing when something is wrong."""

    @property
    def last_line(self) -> str:
        lines = self.stderr.splitlines()
        return lines[-1] if lines else ""


class FaultsTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        (self.folder / "data").mkdir()
        words = random.Random(1)
        (self.folder / "data" / "0.txt").write_text(" ".join(words.choice(WORDS) for _ in range(2000)))
        zeroth = {"timeout_ms": TIMEOUT_MS, "frozen_after_ms": FROZEN_AFTER_MS}
        (self.folder / "zero.json").write_text(json.dumps({"zeroth": zeroth}))
        left_behind.adopt_orphans()

    # --- a job ------------------------------------------------------------------------------------------------------

    def start(self, stage: int) -> subprocess.Popen[bytes]:
        """Trains without end, its output in files: a pipe that nobody reads would stop it."""
        for name in ("records", "stdout", "stderr"):
            (self.folder / name).unlink(missing_ok=True)
        command = [
            RUN,
            "-n",
            str(RANKS),
            "--env",
            "OMP_NUM_THREADS=1",
            GPT,
            "--data",
            str(self.folder / "data"),
            *MODEL,
            "--config",
            str(self.folder / "zero.json"),
            "--zero-stage",
            str(stage),
            "--steps",
            "100000000",
            "--json",
            str(self.folder / "records"),
        ]

        def undo_background() -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)  # a script's background has SIGINT ignored

        with (self.folder / "stdout").open("wb") as stdout, (self.folder / "stderr").open("wb") as stderr:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=undo_background,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )

    def output(self) -> str:
        return "".join(f"--- {name}\n{left_behind.read(self.folder / name)[-3000:]}" for name in ("stdout", "stderr"))

    def ranks_of(self, launcher: subprocess.Popen[bytes]) -> dict[int, int]:
        """Pids by rank, of all of them that are past exec()."""
        found = {}
        for child in left_behind.children_of(launcher.pid):
            rank = re.search(r"(?:^|\0)RANK=(\d+)\0", left_behind.read(left_behind.PROC / str(child) / "environ"))
            if rank is not None:
                found[int(rank.group(1))] = child
        return found

    def wait_for(self, launcher: subprocess.Popen[bytes], moment: Moment, chance: random.Random) -> dict[int, int]:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.assertIsNone(launcher.poll(), f"ended before anything was done to it\n{self.output()}")
            pids = self.ranks_of(launcher)
            steps = left_behind.read(self.folder / "records").count("\n")
            if len(pids) == RANKS and steps >= moment.step:
                time.sleep(chance.uniform(0, moment.spread_s))
                return pids
            time.sleep(0.002)
        raise AssertionError(f"step {moment.step} did not come\n{self.output()}")

    def strike(self, moment: Moment, number: signal.Signals, seed: int, *, launcher_itself: bool = False) -> Job:
        """Starts a job, sends the signal, waits for the end and looks for what is left."""
        chance = random.Random(seed)
        stage = chance.randrange(4)
        victim = chance.randrange(RANKS)
        left = left_behind.LeftBehind(self.temporary)
        launcher = self.start(stage)
        try:
            pids = self.wait_for(launcher, moment, chance)
            os.kill(launcher.pid if launcher_itself else pids[victim], number)
            try:
                exit_code = launcher.wait(timeout=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job goes on after {number.name}\n{self.output()}") from None
            job = Job(
                exit_code=exit_code,
                victim=victim,
                pid=pids[victim],
                stderr=left_behind.read(self.folder / "stderr"),
                output=f"stage {stage}, victim rank {victim} (pid {pids[victim]}), exit code {exit_code}\n{self.output()}",  # noqa: E501
            )
            self.assertEqual(left.text(), "", job.output)
            return job
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
            left_behind.kill_descendants()

    # --- signals to one rank ----------------------------------------------------------------------------------------

    @tier.both
    def test_a_killed_rank_is_named_with_its_signal(self) -> None:
        for moment in MOMENTS:
            for seed in tier.rows((1, 2), (1,)):
                with self.subTest(moment=moment.name, seed=seed):
                    job = self.strike(moment, signal.SIGKILL, seed)
                    self.assertEqual(job.exit_code, 128 + signal.SIGKILL, job.output)
                    self.assertIn(
                        f"zeroth-run: rank {job.victim} (pid {job.pid}) was killed by signal 9 (SIGKILL)",
                        job.last_line,
                        job.output,
                    )

    @tier.both
    def test_a_frozen_rank_is_named_by_the_others(self) -> None:
        for moment in (FIRST_STEPS, LATER):
            for seed in tier.rows((11, 12), (11,)):
                with self.subTest(moment=moment.name, seed=seed):
                    job = self.strike(moment, signal.SIGSTOP, seed)
                    self.assertEqual(job.exit_code, PEER_LOST, job.output)
                    self.assertRegex(
                        job.last_line,
                        rf"ZEROTH ERROR \[PEER_LOST\] .*rank {job.victim} .*is frozen.*process state T",
                        job.output,
                    )

    def test_a_rank_that_freezes_while_the_others_come_ends_the_job(self) -> None:
        # Whoever has not come yet gives no sign of life that could end: only the timeout helps.
        (self.folder / "zero.json").write_text(
            json.dumps({"zeroth": {"timeout_ms": 2_000, "frozen_after_ms": FROZEN_AFTER_MS}})
        )
        job = self.strike(STARTING, signal.SIGSTOP, 21)
        self.assertEqual(job.exit_code, PEER_LOST, job.output)
        self.assertRegex(job.last_line, r"ZEROTH ERROR \[(PEER_LOST|TIMEOUT)\]", job.output)

    def test_an_interrupted_rank_is_named_with_its_signal(self) -> None:
        job = self.strike(LATER, signal.SIGINT, 31)
        self.assertEqual(job.exit_code, 128 + signal.SIGINT, job.output)
        self.assertIn(f"rank {job.victim} (pid {job.pid}) was killed by signal 2 (SIGINT)", job.last_line, job.output)

    # --- signals to the launcher ------------------------------------------------------------------------------------

    @tier.both
    def test_stop_signals_to_the_launcher_end_all_ranks(self) -> None:
        every = [(number, moment) for number in (signal.SIGINT, signal.SIGTERM) for moment in MOMENTS]
        for number, moment in tier.rows(every, [every[0], every[4]]):
            with self.subTest(signal=number.name, moment=moment.name):
                job = self.strike(moment, number, 40 + number, launcher_itself=True)
                self.assertEqual(job.exit_code, 128 + number, job.output)
                self.assertEqual(
                    job.last_line,
                    f"zeroth-run: stopped by signal {number.value} ({number.name}); {RANKS} ranks were ended.",
                    job.output,
                )

    def test_ranks_die_with_a_killed_launcher(self) -> None:
        job = self.strike(LATER, signal.SIGKILL, 51, launcher_itself=True)
        self.assertEqual(job.exit_code, -signal.SIGKILL, job.output)

    # --- the check itself -------------------------------------------------------------------------------------------

    def test_what_is_left_on_purpose_is_found(self) -> None:
        left = left_behind.LeftBehind(self.temporary)
        self.assertEqual(left.text(), "")
        code = (
            "import mmap, os, time; fd = os.memfd_create('zeroth:left'); os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096)\n"  # noqa: E501
            "print(os.getpid(), flush=True); time.sleep(60)"
        )
        orphan = self.leave_orphan(code)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0zeroth-comm-{os.getuid()}-left")
        listener.listen()
        (self.temporary / "forgotten").write_text("text")
        text = left.text(patience_s=0.05)
        listener.close()
        (self.temporary / "forgotten").unlink()
        os.kill(orphan, signal.SIGKILL)
        self.assertIn(f"process {orphan} ", text)
        self.assertRegex(text, rf"process {orphan} maps shared memory")
        self.assertRegex(text, r"socket @zeroth-comm-\d+-left ")
        self.assertIn(f"file {self.temporary / 'forgotten'}", text)
        self.assertEqual(left.text(), "")

    def leave_orphan(self, code: str) -> int:
        """Pid of a Python process whose parent has ended."""
        script = self.folder / "orphan.py"
        script.write_text(code)
        starter = f"import subprocess, sys; subprocess.Popen([sys.executable, {str(script)!r}])"
        with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            return int(parent.stdout.readline())


if __name__ == "__main__":
    del sys.argv[1:3]
    tier.main()
