"""Forked DataLoader workers beside a live engine: same bits as without them, and nothing stays, not even of one that
was killed."""

from __future__ import annotations

import pathlib
import re

import job
import tier


class WorkersTest(job.RankTest):
    @tier.both
    def test_training_with_workers(self) -> None:
        for stage in tier.rows((0, 3), (3,)):
            self.train("shm", stage)

    @tier.both
    def test_training_with_workers_over_a_group(self) -> None:
        for stage in tier.rows((0, 3), (0,)):
            self.train("c10d gloo", stage, "group")

    def train(self, backend: str, stage: int, *arguments: str) -> None:
        told = self.run_well(2, "workers_rank.py", str(stage), *arguments, limit_s=120)
        self.assertEqual(re.findall(r"world: (.*)", told), [backend] * 2, told)
        self.assertEqual(len(re.findall(r"^\[1\] torch says: DataLoader worker", told, re.MULTILINE)), 1, told)
        processes = re.findall(r"\d+", " ".join(re.findall(r"processes: (.*)", told)))
        self.assertEqual(len(processes), 2 * (1 + 10), told)  # two ranks; 4 + 2 + 4 workers
        self.assertEqual([pid for pid in processes if pathlib.Path("/proc", pid).exists()], [])
        left = [
            path.name
            for path in pathlib.Path("/dev/shm").iterdir()
            if set(re.findall(r"\d+", path.name)) & set(processes)
        ]
        self.assertEqual(left, [])


if __name__ == "__main__":
    tier.main()
