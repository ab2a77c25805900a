"""Models on a CUDA device: equal bits at all stages, plain torch to 1e-12 in float64, one rank and two that share the device, over
shared memory and over groups of torch's. Skipped where there is none; zeroth.compute_copies (parity_test.py) goes the same way on CPUs.
"""

from __future__ import annotations

import sys
import unittest

import job
import torch


class Parity(unittest.TestCase):
    def check(self, ranks: int) -> None:
        done = job.run(ranks, "parity_rank.py", "--device", "cuda")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_one_rank(self) -> None:
        self.check(1)

    def test_two_ranks(self) -> None:
        self.check(2)


class Engine(unittest.TestCase):
    def ok(self, ranks: int, *arguments: str) -> None:
        done = job.run(ranks, "cuda_rank.py", *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_group_with_both_backends(self) -> None:
        self.ok(2, "group", "cpu:gloo,cuda:gloo")

    def test_a_group_of_nccl(self) -> None:
        self.ok(min(2, torch.cuda.device_count()), "group", "nccl")

    def test_mistakes_are_named(self) -> None:
        self.ok(1, "mistakes")

    def test_copies_are_as_large_as_planned_and_nothing_grows(self) -> None:
        self.ok(1, "memory")

    def test_buffers_and_exports(self) -> None:
        self.ok(2, "buffers")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device: torch.cuda.is_available() is False")
        sys.exit(77)
    unittest.main(verbosity=2)
