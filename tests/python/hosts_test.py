"""Two hosts under a real mpirun: two levels by themselves, with the bits of shared memory; and a cable that is cut."""

from __future__ import annotations

import os
import re
import sys
import unittest

import forked
import hosts
import job
import mpi_test
import tier


class SeveralHosts(unittest.TestCase):
    @tier.both
    def test_each_host_is_a_node_with_shared_memory_inside_it_and_over_mpi_alone(self) -> None:
        one_host, one_host_bytes = mpi_test.Mpirun().trained(4, "", per_node=2)
        every = (("", "shm+mpi"), ("mpi", "mpi"))
        for wanted, backend in tier.rows(every, every[:1]):
            with hosts.Hosts(2) as two:
                command = two.mpirun(os.environ["ZEROTH_MPIRUN"], 2, mpi_test.PROGRAM)
                with job.Family(command, mpi_test.variables(ZEROTH_BACKEND=wanted, RANKS_PER_NODE="0")) as family:
                    done = family.end(240)
                    self.assertEqual(family.left.text(), "")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(
                f"info: 4 ranks over {backend}, says OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (mpirun)",
                done.stderr,
            )
            told = re.findall(rf"(\d) of 4 over {re.escape(backend)}, stage (\d): (.*)", done.stdout)
            self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 16, done.stdout)
            self.assertEqual({losses for _, _, losses in told}, {one_host}, backend)
            between = mpi_test.bytes_of(done.stderr)
            self.assertEqual(between.keys(), one_host_bytes.keys(), done.stderr)
            for key, (_, far) in between.items():
                # Over MPI alone all that crosses is counted, as on virtual nodes.
                self.assertTrue(
                    far == one_host_bytes[key][1] if backend == "mpi" else 0 < far < 0.6 * one_host_bytes[key][1],
                    (backend, key, far),
                )

    @tier.long
    def test_zeroth_run_starts_it_with_all_variables(self) -> None:
        with hosts.Hosts(2) as two:
            settings = {
                "OMPI_MCA_plm_rsh_agent": str(two.agent),
                "OMPI_MCA_btl": "self,vader,tcp",
                "OMPI_MCA_btl_tcp_if_include": f"{two.net}.0/24",
                "OMPI_MCA_oob_tcp_if_include": f"{two.net}.0/24",
            }
            path = f"{os.path.dirname(os.environ['ZEROTH_MPIRUN'])}:{os.environ['PATH']}"
            command = [
                job.RUN,
                "--launcher",
                "mpirun",
                "--bind-cores",
                "off",
                "--hosts",
                f"{two.net}.1:2,{two.net}.2:2",
                *forked.python(),
                mpi_test.PROGRAM,
            ]
            with job.Family(command, mpi_test.variables(RANKS_PER_NODE="0", PATH=path, **settings)) as family:
                done = family.end(240)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(
            done.stderr,
            rf"zeroth-run: mpirun -n 4 --bind-to none -H {two.net}\.1:2,{two.net}\.2:2 (-x \w+ )*-x RANKS_PER_NODE ",
        )
        told = re.findall(r"(\d) of 4 over shm\+mpi, stage (\d): (.*)", done.stdout)
        self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 16, done.stdout)

    def test_a_cable_that_is_cut_ends_in_a_line_that_names_a_rank(self) -> None:
        with hosts.Hosts(2) as two:
            command = two.mpirun(os.environ["ZEROTH_MPIRUN"], 2, mpi_test.PROGRAM, "for ever")
            with job.Family(command, mpi_test.variables(ZEROTH_BACKEND="", RANKS_PER_NODE="0")) as family:
                family.wait_for("trained", 4)
                two.cut(2)
                self.assertRegex(hosts.verdict(family), hosts.LOST_OVER_A_CUT_CABLE)


def main() -> int:
    reason = hosts.why_not()
    if reason:
        print(f"SKIPPED: {reason}")
        return 77
    return tier.run()


if __name__ == "__main__":
    sys.exit(main())
