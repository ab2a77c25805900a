"""story.py: what a user does in one job, in at most 80 statements, prints the same at all stages."""

from __future__ import annotations

import pathlib
import re
import tempfile
import unittest

import job

NUMBER = r"(\d\.\d+)"
STEP = re.compile(rf"step (\d+) losses \({NUMBER}, {NUMBER}\) accuracies \({NUMBER}, {NUMBER}\)")


class StoryTest(job.RankTest):
    def told(self, *stages: int) -> list[str]:
        """Lines of both ranks, sorted; each begins with its rank."""
        with tempfile.TemporaryDirectory() as folder:
            told = self.run_well(
                2, "story.py", *map(str, stages), str(pathlib.Path(folder) / "student.safetensors"), limit_s=120
            )
        return sorted(told.splitlines())

    def test_the_script_is_short(self) -> None:
        self.assertLessEqual(job.statements(job.HERE / "story.py"), 80)

    def test_it_ends_the_same_at_all_stages(self) -> None:
        lines = self.told(2, 3, 0)
        self.assertEqual(self.told(0, 1, 3), lines)
        self.assertEqual(
            [line for line in lines if "step" not in line],
            [
                "[0] equal logits in plain torch: True",
                "[1] caught: what comes into the block is not finite",
                "[1] equal logits in plain torch: True",
            ],
        )
        of_ranks = [[STEP.findall(line)[0] for line in lines if line.startswith(f"[{rank}] step")] for rank in (0, 1)]
        self.assertEqual(of_ranks[0], of_ranks[1])
        self.assertEqual([int(step[0]) for step in of_ranks[0]], [30, 60, 90])
        first, _, last = ([float(value) for value in step[1:]] for step in of_ranks[0])
        self.assertLess(last[0], first[0])
        self.assertGreater(min(last[2:]), 0.6)  # four classes, a quarter each


if __name__ == "__main__":
    unittest.main(verbosity=2)
