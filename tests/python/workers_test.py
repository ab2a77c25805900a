"""Forked DataLoader workers beside a live engine: same bits as without them, and nothing stays, not even of one that was killed."""

from __future__ import annotations

import pathlib
import re
import unittest

import job


class WorkersTest(unittest.TestCase):
    def test_training_with_workers(self) -> None:
        done = job.run(2, "workers_rank.py", limit_s=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(len(re.findall(r"^\[1\] torch says: DataLoader worker", done.stdout, re.MULTILINE)), 2, done.stdout)
        processes = re.findall(r"\d+", " ".join(re.findall(r"processes: (.*)", done.stdout)))
        self.assertEqual(len(processes), 2 * (1 + 2 * 10), done.stdout)  # two ranks; at each stage 4 + 2 + 4 workers
        self.assertEqual([pid for pid in processes if pathlib.Path("/proc", pid).exists()], [])
        left = [path.name for path in pathlib.Path("/dev/shm").iterdir() if set(re.findall(r"\d+", path.name)) & set(processes)]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
