"""Forked DataLoader workers beside a live engine: same bits as without them, and nothing stays, not even of one that was killed."""

from __future__ import annotations

import pathlib
import re
import unittest

import job


class WorkersTest(job.RankTest):
    def test_training_with_workers(self) -> None:
        told = self.run_well(2, "workers_rank.py", limit_s=120)
        self.assertEqual(len(re.findall(r"^\[1\] torch says: DataLoader worker", told, re.MULTILINE)), 2, told)
        processes = re.findall(r"\d+", " ".join(re.findall(r"processes: (.*)", told)))
        self.assertEqual(len(processes), 2 * (1 + 2 * 10), told)  # two ranks; at each stage 4 + 2 + 4 workers
        self.assertEqual([pid for pid in processes if pathlib.Path("/proc", pid).exists()], [])
        left = [path.name for path in pathlib.Path("/dev/shm").iterdir() if set(re.findall(r"\d+", path.name)) & set(processes)]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
