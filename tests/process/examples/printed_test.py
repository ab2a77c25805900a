#!/usr/bin/env python3
"""An example in C++ prints on two ranks what its header says, and on one rank the same losses.

usage: printed_test.py ZEROTH_RUN PROGRAM SOURCE
"""

import os
import pathlib
import subprocess
import sys
import unittest

RUN, PROGRAM, SOURCE = sys.argv[1:4]


def expected_lines() -> list[str]:
    """The lines between "prints" and the next paragraph of the header."""
    header = pathlib.Path(SOURCE).read_text().partition("\n// prints\n//\n")[2].partition("\n//\n")[0]
    return [line.removeprefix("//   ") for line in header.splitlines()]


def printed(command: list[str]) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


class PrintedTest(unittest.TestCase):
    def test_two_ranks_print_what_the_header_says(self) -> None:
        expected = expected_lines()
        self.assertGreater(len(expected), 8)
        self.assertEqual(printed([RUN, "-q", "--no-prefix", "-n", "2", PROGRAM]), expected)

    def test_one_rank_has_the_same_losses(self) -> None:
        losses = [line for line in expected_lines() if "loss 0." in line]
        self.assertEqual([line for line in printed([PROGRAM]) if "loss 0." in line], losses)


if __name__ == "__main__":
    del sys.argv[1:4]
    unittest.main(verbosity=2)
