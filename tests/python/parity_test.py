"""Models of the zoo through the Python engine: equal bits at all stages, plain torch to 1e-12 in float64. And two
models through the matrix of plans, modes, dtypes, accumulation and policies. In `make test` every two values meet; the
long tier has the whole grids.
"""

from __future__ import annotations

import job
import tier


class ShortLists(job.RankTest):
    def test_the_matrix(self) -> None:
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks):
                self.assertRegex(self.run_well(ranks, "matrix_rank.py", "--short"), r"\b[1-9]\d* runs: ok")

    def test_the_zoo(self) -> None:
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                self.assertRegex(self.run_well(ranks, "parity_rank.py", "--short"), r"\b[1-9]\d* trainings: ok")

    def test_plans_for_slow_links_bring_fewer_bytes_between_nodes(self) -> None:
        self.assertIn("bytes between nodes: stage 3 ", self.run_well(4, "links_rank.py"))


@tier.long
class Grids(job.RankTest):
    def test_the_matrix(self) -> None:
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                self.assertIn("228 runs: ok", self.run_well(ranks, "matrix_rank.py", "late=all", "foreign=some"))

    def test_a_part_of_the_matrix_in_the_other_worlds(self) -> None:
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.assertIn("72 runs: ok", self.run_well(ranks, "matrix_rank.py", "late=some", "foreign=some"))

    def test_the_zoo(self) -> None:
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                self.assertIn("280 trainings: ok", self.run_well(ranks, "parity_rank.py"))


if __name__ == "__main__":
    tier.main()
