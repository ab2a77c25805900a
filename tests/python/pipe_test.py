"""Models in the stages of a pipeline train as on one process: every schedule, ZeRO stage and axis of the mesh."""

from __future__ import annotations

import tempfile
import unittest

import forked
import job
import tier
from pipe_errors import Errors

forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "qwen2")),
)

__all__ = ["Errors"]


class Trainings(job.RankTest):
    def test_few_rows_on_two_ranks(self) -> None:
        self.run_well(2, "pipe_rank.py", "few 2")

    def test_few_rows_on_four_ranks(self) -> None:
        self.run_well(4, "pipe_rank.py", "few 4")

    @tier.long
    def test_rows_of_two_ranks(self) -> None:
        self.run_well(2, "pipe_rank.py", "two", "half", "schedules 2")

    @tier.long
    def test_rows_of_three_ranks(self) -> None:
        self.run_well(3, "pipe_rank.py", "three", "schedules 3")

    @tier.long
    def test_rows_of_four_ranks(self) -> None:
        self.run_well(4, "pipe_rank.py", "four", "tp", "sp", "schedules 4")

    @tier.long
    def test_rows_of_eight_ranks(self) -> None:
        self.run_well(8, "pipe_rank.py", "eight")

    @tier.long
    def test_every_schedule_with_every_number_of_micro_batches(self) -> None:
        self.run_well(2, "pipe_rank.py", "grid", limit_s=900)


class States(job.RankTest):
    def test_a_checkpoint_of_two_stages_loads_elsewhere(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            saved = self.states(2, "save", folder, 2, "1f1b")
            for ranks, stages, schedule in tier.rows(
                [(1, 1, "none"), (3, 3, "zb-h1"), (2, 2, "deferred"), (4, 2, "interleaved"), (2, 1, "none")],
                [(1, 1, "none"), (3, 3, "zb-h1")],
            ):
                loaded = self.states(ranks, "load", folder, stages, schedule)
                self.assertEqual(loaded[0], saved[0], (ranks, stages, schedule))
                if ranks == stages:  # else there are more samples
                    self.assertAlmostEqual(loaded[1], saved[1], 12)

    test_a_checkpoint_of_two_stages_loads_elsewhere.tiers = {False, True}  # type: ignore[attr-defined]

    def states(self, ranks: int, what: str, folder: str, stages: int, schedule: str) -> tuple[str, float]:
        """Digests of weights and moments, and the loss of the step after."""
        out = self.run_well(ranks, "pipe_state_rank.py", what, folder, str(stages), schedule)
        lines = [line.partition("] ")[2] if line.startswith("[") else line for line in out.splitlines()]
        digests = next(line for line in lines if line.startswith("weights"))
        after = next(line for line in lines if line.startswith("after")).split()[1]
        return digests, float(after)


if __name__ == "__main__":
    unittest.main()
