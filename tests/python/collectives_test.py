"""zeroth.parallel's calls between ranks and their gradients, on four ranks."""

from __future__ import annotations

import unittest

import job


class OnFourRanks(job.RankTest):
    def test_every_call_and_gradient_is_that_of_a_plain_computation(self) -> None:
        self.assertEqual(self.run_well(4, "collectives_rank.py").count("every call: ok"), 4)

    def test_a_mismatch_names_the_call(self) -> None:
        for case, text in (
            ("grad", "all_reduce of float32 \\[4, 4\\].*requires_grad on all ranks or on none"),
            (
                "shape",
                "an earlier error has ended the group: ranks make different calls; .*"
                "which: all_reduce of float32 \\[4, 4\\], which was not made; expected: all_gather",
            ),
            ("call", "(all_reduce|reduce_from_group) of float32 \\[4, 4\\]"),
            ("backward", "zeroth.Error: \\[MISMATCH\\].*copy_to_group, backward of float32 \\[4, 4\\]"),
        ):
            with self.subTest(case):
                done = job.run(2, "collectives_rank.py", "order", case)
                self.assertNotEqual(done.returncode, 0, done.stderr)
                self.assertRegex(done.stderr, text)


if __name__ == "__main__":
    unittest.main()
