"""Runs rank programs under zeroth-run and looks at how they end."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Mapping

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import left_behind  # noqa: E402

RUN = os.environ["ZEROTH_RUN"]
"""path of zeroth-run, from CMake"""
TIME_LIMIT_S = 300
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
        sys.executable,
        str(HERE / program),
        *arguments,
    ]


def run(ranks: int, program: str, *arguments: str, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Under zeroth-run, whose ranks end with it; nothing of it may be left."""
    with Family(command(ranks, program, *arguments)) as family:
        return family.end(limit_s)


class Family:
    """A process with its output in files, and all that is below it. What of them lives when the block ends is killed;
    what is left when the process was waited for is a failure."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str] = os.environ) -> None:
        self.arguments = arguments
        self.environment = environment

    def __enter__(self) -> Family:
        self.folder = tempfile.TemporaryDirectory()
        temporary = pathlib.Path(self.folder.name, "tmp")
        temporary.mkdir()
        left_behind.adopt_orphans()
        self.left = left_behind.LeftBehind(temporary)
        with open(self.folder.name + "/out", "wb") as out, open(self.folder.name + "/err", "wb") as err:
            self.process = subprocess.Popen(
                self.arguments,
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
        return self

    def __exit__(self, *_: object) -> None:
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
        code = self.process.wait(limit_s)
        left = [line for line in self.left.text().splitlines() if not may_leave or may_leave not in line]
        if left:
            raise AssertionError("\n".join(["left:", *left, self.output("out"), self.output("err")]))
        return subprocess.CompletedProcess(self.arguments, code, self.output("out"), self.output("err"))


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


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
