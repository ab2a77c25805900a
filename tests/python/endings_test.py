"""How the ranks of a Python job end, and what holds between them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import unittest

import job


class Processes(job.RankTest):
    def test_an_exception_on_one_rank_is_named_first(self) -> None:
        self.rank_1_is_named_first("trouble_rank.py", "exception")

    def test_ranks_that_disagree_are_told_on_all_ranks(self) -> None:
        done = job.run(2, "trouble_rank.py", "disagree")
        self.assertNotEqual(done.returncode, 0)
        for rank in (0, 1):
            self.assertRegex(done.stdout, rf"rank {rank} is told: \[MISMATCH\]")

    def test_ctrl_c_ends_a_wait_and_the_rank_can_go_on(self) -> None:
        # Rank 0 waits for rank 1, in forward, backward, step and construction in turn; each time it gets SIGINT.
        for where in ("construction", "forward", "backward", "step"):
            with self.subTest(where=where):
                done = job.run(2, "trouble_rank.py", "interrupt", where, limit_s=120)
                text = done.stdout + done.stderr
                taken = re.search(r"KeyboardInterrupt after (\d+\.\d+) s", text)
                self.assertIsNotNone(taken, text)

    def test_buffers_are_rank_zeros_in_every_training_forward(self) -> None:
        self.run_well(3, "buffers_rank.py")

    def test_backward_does_not_take_the_gil(self) -> None:
        # Rank 1 goes on only while rank 0 does, whose GIL is taken for two seconds. A hook in Python has to wait for it: so the
        # test would see one. Should the thread take the GIL before backward has begun, the run says nothing: hence three of them.
        def seconds(hook: str) -> float:
            done = job.run(2, "trouble_rank.py", "gil", hook)
            taken = re.search(r"backward took (\d+\.\d+) s", done.stdout)
            assert taken is not None, done.stdout + done.stderr
            return float(taken[1])

        self.assertTrue(any(seconds("none") < 1.5 for _ in range(3)))
        self.assertGreater(seconds("python"), 1.5)

    def test_a_rank_that_gives_up_tells_the_others_why(self) -> None:
        done = job.run(3, "trouble_rank.py", "give_up")
        for rank in range(3):
            self.assertRegex(done.stdout, rf"rank {rank} is told: \[ABORTED\].*the data has run out.*rank 1/3", done.stderr)

    def test_a_killed_rank_is_named(self) -> None:
        done = job.run(2, "trouble_rank.py", "kill")
        self.assertEqual(done.returncode, 128 + signal.SIGKILL)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    def test_a_bare_process_is_a_world_of_one(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", "import zeroth; print(zeroth.World.from_environment())"],
                              env=environment, capture_output=True, text=True, timeout=120, check=True)
        self.assertEqual(done.stdout.strip(), "zeroth.World(rank=0, size=1, backend='self')")
        self.assertLess(time.monotonic() - begin, 120)


if __name__ == "__main__":
    unittest.main(verbosity=2)
