"""Models of the zoo through the Python engine: equal bits at all stages, plain torch to 1e-12 in float64. And one model through the
whole matrix of plans, modes, dtypes, accumulation and policies.
"""

from __future__ import annotations

import unittest

import job


class ParityTest(job.RankTest):
    def test_the_matrix(self) -> None:
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                self.assertIn("108 runs: ok", self.run_well(ranks, "matrix_rank.py"))

    def test_one_rank(self) -> None:
        self.run_well(1, "parity_rank.py")

    def test_two_ranks(self) -> None:
        self.run_well(2, "parity_rank.py")

    def test_three_ranks(self) -> None:
        self.run_well(3, "parity_rank.py")


if __name__ == "__main__":
    unittest.main(verbosity=2)
