"""Runs rank programs under zeroth-run and looks at how they end."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
RUN = os.environ["ZEROTH_RUN"]
"""path of zeroth-run, from CMake"""
TIME_LIMIT_S = 300


def run(ranks: int, program: str, *arguments: str, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """`program` is a file of this folder."""
    return subprocess.run(
        [RUN, "-n", str(ranks), "--no-merge", "--env", "OMP_NUM_THREADS=1", sys.executable, str(HERE / program), *arguments],
        capture_output=True, text=True, timeout=limit_s, check=False,
    )


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
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"zeroth-run: rank 1 \(pid \d+\) exited with code 1")


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
