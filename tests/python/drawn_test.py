"""Trainings drawn from seeds: any features together have the numbers of one process, and other ways to run them the
same bits."""

from __future__ import annotations

import random
import unittest

import forked
import job
from drawn import SCHEDULES, draw_config, draw_training

forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "gpt2")),
)


class Drawn(job.RankTest):
    """drawn_rank.py."""

    def test_four_ranks(self) -> None:
        self.run_well(4, "drawn_rank.py", "0", "60", limit_s=600)

    def test_two_ranks(self) -> None:
        self.run_well(2, "drawn_rank.py", "1000", "1025", limit_s=600)

    def test_eight_ranks(self) -> None:
        self.run_well(8, "drawn_rank.py", "2000", "2020", limit_s=600)

    def test_what_is_drawn_has_every_feature(self) -> None:
        trainings = [draw_training(random.Random(seed), 4) for seed in range(200)]
        self.assertEqual({one.schedule for one in trainings if one.pp > 1}, set(SCHEDULES))
        for name in ("pp", "tp", "sp", "tiled", "vocabulary", "policy", "dtype", "adamw"):
            self.assertGreater(len({getattr(one, name) for one in trainings}), 1, name)
        configs = [draw_config(random.Random(seed), one, 4) for seed, one in enumerate(trainings)]
        self.assertEqual({one["zero_optimization"]["stage"] for one in configs}, set(range(4)))
        found = {key for one in configs for key in {**one["zero_optimization"], **one["zeroth"]}}
        self.assertLessEqual({"offload_optimizer", "offload_param", "activations", "update"}, found)


if __name__ == "__main__":
    unittest.main()
