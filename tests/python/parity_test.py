"""Models of the zoo through the Python engine: equal bits at all stages, plain torch to 1e-12 in float64. And one model through the
whole matrix of plans, modes, dtypes, accumulation and policies.
"""

from __future__ import annotations

import unittest

import job


class ParityTest(unittest.TestCase):
    def check(self, ranks: int) -> None:
        done = job.run(ranks, "parity_rank.py")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_matrix(self) -> None:
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                done = job.run(ranks, "matrix_rank.py")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("108 runs: ok", done.stdout)

    def test_one_rank(self) -> None:
        self.check(1)

    def test_two_ranks(self) -> None:
        self.check(2)

    def test_three_ranks(self) -> None:
        self.check(3)


if __name__ == "__main__":
    unittest.main(verbosity=2)
