"""zeroth.World.mesh() and the calls of its groups, on four ranks."""

from __future__ import annotations

import unittest

import job
import torch

import zeroth


class OnFourRanks(job.RankTest):
    def test_every_call_has_the_bits_of_a_plain_computation(self) -> None:
        self.assertEqual(self.run_well(4, "mesh_rank.py").count("every call: ok"), 4)

    def test_an_exception_of_one_rank_ends_the_calls_of_the_others(self) -> None:
        done = job.run(4, "mesh_rank.py", "raises")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("rank 1 stopped the job: [USER] ValueError: no such token", done.stderr)


class Alone(unittest.TestCase):
    def test_a_bare_process_is_a_mesh_of_one(self) -> None:
        mesh = zeroth.World.from_environment().mesh({"dp": 1})
        dp = mesh.axis("dp")
        self.assertEqual((dp.rank, dp.size, mesh.coordinate("dp")), (0, 1, 0))
        tensor = torch.arange(3.0)
        self.assertIs(dp.all_reduce(tensor), tensor)
        self.assertTrue(torch.equal(dp.all_gather(tensor), tensor))
        self.assertTrue(torch.equal(dp.all_to_all(tensor), tensor))


if __name__ == "__main__":
    unittest.main()
