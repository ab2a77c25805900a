"""Two hosts under a real mpirun: two levels by themselves, with the bits of shared memory; and a cable that is cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import unittest

import hosts
import job
import mpi_test


class SeveralHosts(unittest.TestCase):
    def test_shared_memory_inside_each_host_and_mpi_between_them(self) -> None:
        with hosts.Hosts(2) as two:
            command = two.mpirun(os.environ["ZEROTH_MPIRUN"], 2, mpi_test.PROGRAM)
            with job.Family(command, mpi_test.variables(ZEROTH_BACKEND="", RANKS_PER_NODE="0")) as family:
                done = family.end(240)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("info: 4 ranks over shm+mpi, says OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (mpirun)", done.stderr)
        told = re.findall(r"(\d) of 4 over shm\+mpi, stage (\d): (.*)", done.stdout)
        self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 16, done.stdout)
        one_host = mpi_test.Mpirun().trained(4, "", per_node=2)[0]
        self.assertEqual({losses for _, _, losses in told}, {one_host})

    def test_a_cable_that_is_cut_ends_in_a_line_that_names_a_rank(self) -> None:
        with hosts.Hosts(2) as two:
            command = two.mpirun(os.environ["ZEROTH_MPIRUN"], 2, mpi_test.PROGRAM, "for ever")
            with job.Family(command, mpi_test.variables(ZEROTH_BACKEND="", RANKS_PER_NODE="0")) as family:
                family.wait_for("trained", 4)
                two.cut(2)
                begin = time.monotonic()
                while not re.search(r"\[(TIMEOUT|PEER_LOST)\].*\n", family.output("err")):
                    self.assertLess(time.monotonic() - begin, 60, family.output("err"))
                    time.sleep(0.1)
                text = family.output("err")
        # MPI does not see it; the control plane does, long before the deadline of 20 s.
        self.assertRegex(text, r"\[PEER_LOST\] rank [23] \(pid \d+ on \S+\) (is gone|has given no sign of life).*who: rank [01]/4; expected: .* from rank [23]; "
                               r"got: ranks? 0.* waits? for .* at \S+mpi_rank\.py:\d+")


def main() -> int:
    reason = hosts.why_not()
    if reason:
        print(f"SKIPPED: {reason}")
        return 77
    done = unittest.main(verbosity=2, exit=False)
    return 0 if done.result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
