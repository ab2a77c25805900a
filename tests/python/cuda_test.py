"""Models on a CUDA device: equal bits at all stages, plain torch to 1e-12 in float64, one rank and two that share the
device, over shared memory and over groups of torch's. Skipped where there is none; zeroth.compute_copies
(parity_test.py) goes the same way on CPUs.
"""

from __future__ import annotations

import sys
import unittest

import job
import torch


class Cuda(job.RankTest):
    def test_parity_on_one_rank(self) -> None:
        self.run_well(1, "parity_rank.py", "--device", "cuda")

    def test_parity_on_two_ranks(self) -> None:
        self.run_well(2, "parity_rank.py", "--device", "cuda")

    def test_a_group_with_both_backends(self) -> None:
        self.run_well(2, "cuda_rank.py", "group", "cpu:gloo,cuda:gloo")

    def test_a_group_of_nccl(self) -> None:
        self.run_well(min(2, torch.cuda.device_count()), "cuda_rank.py", "group", "nccl")

    def test_mistakes_are_named(self) -> None:
        self.run_well(1, "cuda_rank.py", "mistakes")

    def test_copies_are_as_large_as_planned_and_nothing_grows(self) -> None:
        self.run_well(1, "cuda_rank.py", "memory")

    def test_matrices_and_sequences_that_ranks_share(self) -> None:
        self.run_well(4, "cuda_rank.py", "rows", "tensor_rank", "few")

    def test_pipelines(self) -> None:
        self.run_well(4, "cuda_rank.py", "rows", "pipe_rank", "few 4")
        self.run_well(2, "cuda_rank.py", "rows", "pipe_rank", "few 2")
        self.run_well(2, "cuda_rank.py", "shared_head")

    def test_buffers_and_exports(self) -> None:
        self.run_well(2, "cuda_rank.py", "buffers")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("SKIPPED: no CUDA device: torch.cuda.is_available() is False")
        sys.exit(77)
    unittest.main(verbosity=2)
