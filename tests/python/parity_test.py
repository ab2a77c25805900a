"""Models of the zoo through the Python engine: equal bits at all stages, plain torch to 1e-12 in float64. And two
models through the matrix of plans, modes, dtypes, accumulation and policies.
"""

from __future__ import annotations

import unittest

import job


class ParityTest(job.RankTest):
    def test_the_matrix(self) -> None:
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                self.assertIn("180 runs: ok", self.run_well(ranks, "matrix_rank.py", "late=all", "foreign=some"))

    def test_a_part_of_the_matrix_in_the_other_worlds(self) -> None:
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.assertIn("72 runs: ok", self.run_well(ranks, "matrix_rank.py", "late=some", "foreign=some"))

    def test_one_rank(self) -> None:
        self.run_well(1, "parity_rank.py")

    def test_two_ranks(self) -> None:
        self.run_well(2, "parity_rank.py")

    def test_three_ranks(self) -> None:
        self.run_well(3, "parity_rank.py")

    def test_plans_for_slow_links_bring_fewer_bytes_between_nodes(self) -> None:
        self.assertIn("bytes between nodes: stage 3 ", self.run_well(4, "links_rank.py"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
