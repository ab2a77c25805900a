"""Runs rank programs under zeroth-run and looks at how they end. They are forked from a process that has imported
torch; see forked.py."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import forked

HERE = pathlib.Path(__file__).resolve().parent
left_behind = forked.left_behind
Key = TypeVar("Key")
Value = TypeVar("Value")

RUN = os.environ["ZEROTH_RUN"]
"""path of zeroth-run, from CMake"""
TIME_LIMIT_S = 300
ALONE = [sys.executable, "-I", "-S", left_behind.__file__]
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def command(ranks: int, program: str, *arguments: str, merge: bool = False) -> list[str]:
    """`program` is a file of this folder."""
    return [
        RUN,
        "-n",
        str(ranks),
        *([] if merge else ["--no-merge"]),
        "--env",
        "OMP_NUM_THREADS=1",
        *forked.python(),
        str(HERE / program),
        *arguments,
    ]


def run(ranks: int, program: str, *arguments: str, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Under zeroth-run, whose ranks end with it; nothing of it may be left."""
    with Family(command(ranks, program, *arguments)) as family:
        return family.end(limit_s)


class Family:
    """A process with its output in files, and all that is below it. What of them lives when the block ends is killed;
    what is left when the process was waited for is a failure. `beside`: other jobs of this test run at the same time,
    so a process of its own looks for what is left; it takes no signals for the job."""

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str] = os.environ, *, beside: bool = False
    ) -> None:
        self.arguments = arguments
        self.environment = environment
        self.beside = beside

    def __enter__(self) -> Family:
        self.folder = tempfile.TemporaryDirectory()
        temporary = pathlib.Path(self.folder.name, "tmp")
        temporary.mkdir()
        left_behind.adopt_orphans()
        self.left = left_behind.LeftBehind(temporary)
        with open(self.folder.name + "/out", "wb") as out, open(self.folder.name + "/err", "wb") as err:
            self.process = subprocess.Popen(
                [*(ALONE if self.beside else []), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={
                    **self.environment,
                    "TMPDIR": str(temporary),
                    "TORCHINDUCTOR_CACHE_DIR": self.folder.name + "/torch",
                },
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # ignored in the background of a shell
        if self.beside:
            left_behind.STRANGERS.add(self.process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        if self.beside:
            self.process.terminate()
        else:
            left_behind.kill_descendants()
        self.process.wait()
        self.folder.cleanup()

    def output(self, name: str) -> str:
        """ "out" or "err", so far."""
        return pathlib.Path(self.folder.name, name).read_text()

    def wait_for(self, text: str, count: int, limit_s: float = 60.0) -> None:
        """Until it has written `text` so often."""
        end = time.monotonic() + limit_s
        while self.output("out").count(text) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{text!r} did not come {count} times\n{self.output('out')}{self.output('err')}")
            time.sleep(0.01)

    def end(self, limit_s: float, may_leave: str = "") -> subprocess.CompletedProcess[str]:
        """Waits for it, and looks for what it has left; `may_leave`: part of a line that is another's fault."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{late}\n{self.output('out')}{self.output('err')}") from None
        out, err = self.output("out"), self.output("err")
        left = "" if self.beside else self.left.text()
        if self.beside and left_behind.FAILED in out:
            out, _, left = out.partition(left_behind.FAILED)
        lines = [line for line in left.splitlines() if not may_leave or may_leave not in line]
        lines += [line for line in err.splitlines() if forked.LEFT in line]
        if lines:
            raise AssertionError("\n".join(["left:", *lines, out, err]))
        return subprocess.CompletedProcess(self.arguments, code, out, err)


class RankTest(unittest.TestCase):
    """With jobs that must end well, or by one rank's fault."""

    def run_well(self, ranks: int, program: str, *arguments: str, limit_s: float = TIME_LIMIT_S) -> str:
        """What run() wrote to standard output."""
        done = run(ranks, program, *arguments, limit_s=limit_s)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def rank_1_is_named_first(self, program: str, *arguments: str) -> None:
        """Of three ranks rank 1 ends with code 1, and the last line says so."""
        done = run(3, program, *arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"zeroth-run: rank 1 \(pid \d+\) exited with code 1")


def statements(path: pathlib.Path) -> int:
    """Logical lines: a formatter does not change how many there are."""
    with open(path) as file:
        return sum(token.type == tokenize.NEWLINE for token in tokenize.generate_tokens(file.readline))


def together(jobs: Iterable[Key], call: Callable[[Key], Value], at_once: int = 8) -> dict[Key, Value | Exception]:
    """call(job) of each, side by side, for jobs that sleep: results, or the exception of each. Their families must be
    `beside`."""

    def result(one: Key) -> Value | Exception:
        try:
            return call(one)
        except Exception as error:
            return error

    forked.python()  # started by this thread
    every = list(jobs)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return dict(zip(every, pool.map(result, every), strict=True))
