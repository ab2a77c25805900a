"""States by name: read, written and averaged, with the same bits at every stage."""

from __future__ import annotations

import tempfile
import unittest

import job


class States(job.RankTest):
    def run_calls(self, ranks: int, *calls: str) -> None:
        """All in one job. A rank looks at itself, and says when it is done."""
        out = self.run_well(ranks, "state_rank.py", *calls).splitlines()
        for call in calls:
            done = [line for line in out if f" {call.partition('=')[0]} done" in line]
            self.assertEqual(len(done), ranks, out)

    def test_reads_and_writes_at_every_stage(self) -> None:
        self.run_calls(2, "reads", "updates", "dictionaries", "edits")

    def test_averages_statistics_and_what_trains_later(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.run_calls(2, "averages", f"saved_averages={folder}/a", "statistics", "later", "penalties")
            self.run_calls(2, f"pretrained={folder}/b", "meta")

    def test_writes_of_the_user_and_accumulations_that_end_early(self) -> None:
        calls = ("frozen", "by_data", "masters_stay", "lost", "accumulations", "joined", "reads_of_others")
        calls += ("chains", "on_one_rank", "edits_at_any_stage")
        with tempfile.TemporaryDirectory() as folder:
            out = self.run_well(2, "writes_rank.py", folder, *calls).splitlines()
        for call in calls:
            self.assertEqual(sum(f" {call} done" in line for line in out), 2, out)

    def test_three_ranks(self) -> None:
        self.run_calls(3, "updates", "statistics", "penalties")


if __name__ == "__main__":
    unittest.main()
