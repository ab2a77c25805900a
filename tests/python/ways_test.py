"""Backward reaches units in every way that scripts take to them: equal bits at stages 0 and 3, plain torch to 1e-12."""

from __future__ import annotations

import job
import tier


class Ways(job.RankTest):
    @tier.both
    def test_two_ranks(self) -> None:
        self.assertRegex(self.run_well(2, "ways_rank.py"), r"\b[6-9]\d ways: ok")

    @tier.long
    def test_other_worlds(self) -> None:
        for ranks in (1, 3):
            with self.subTest(ranks=ranks):
                self.assertRegex(self.run_well(ranks, "ways_rank.py"), r"\b[7-9]\d ways: ok")


if __name__ == "__main__":
    tier.main()
