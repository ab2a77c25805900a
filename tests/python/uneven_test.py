"""Loops over engine.batches() in which ranks have different numbers of batches: shared memory, gloo and MPI."""

from __future__ import annotations

import os
import re
import subprocess
import unittest

import forked
import job
import mpi_test
import tier

TRANSPORTS = ["shm", "gloo", *(["mpi"] if os.environ.get("ZEROTH_MPIRUN") else [])]
RANKS = 4


def run(what: str, transport: str) -> subprocess.CompletedProcess[str]:
    """With nothing left behind."""
    command = job.command(RANKS, "uneven_rank.py", what, transport)
    environment = dict(os.environ)
    if transport == "mpi":
        environment = mpi_test.variables(ZEROTH_BACKEND="mpi")
        command = [
            *mpi_test.MPIRUN,
            "-n",
            str(RANKS),
            *forked.python(),
            str(job.HERE / "uneven_rank.py"),
            what,
            transport,
        ]
    with job.Family(command, environment) as family:
        return family.end(180)


class Uneven(unittest.TestCase):
    @tier.both
    def test_join_trains_on_all_batches_with_the_same_bits_at_every_stage_and_transport(self) -> None:
        found = set()
        for transport in tier.rows(TRANSPORTS, ["shm"]):
            with self.subTest(transport):
                done = run("join", transport)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                ends = re.findall(r"(\d): (\w{64})", done.stdout)
                self.assertEqual({rank for rank, _ in ends}, {str(rank) for rank in range(RANKS)}, done.stdout)
                found |= {digest for _, digest in ends}
        found |= (
            {digest for _, digest in re.findall(r"(\d): (\w{64})", run("join", "shm").stdout)} if tier.LONG else set()
        )
        self.assertEqual(len(found), 1)

    @tier.both
    def test_drop_ends_with_the_first_and_who_leaves_a_loop_early_can_begin_another(self) -> None:
        for transport in tier.rows(TRANSPORTS, ["shm"]):
            with self.subTest(transport):
                done = run("drop,leave", transport)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual((done.stdout.count("dropped"), done.stdout.count("left")), (RANKS, RANKS), done.stdout)

    @tier.both
    def test_error_names_who_has_none_and_who_has_more(self) -> None:
        for transport in tier.rows(TRANSPORTS, ["gloo"]):
            with self.subTest(transport):
                done = run("error", transport)
                self.assertEqual(done.returncode, 76, done.stderr)
                self.assertRegex(
                    done.stderr,
                    r'\[MISMATCH\] rank 0 has no batch left, ranks 1-3 have more; .*after step 1; .*zeroth\.uneven = "join"',  # noqa: E501
                )

    def test_an_error_of_a_step_is_everybodys(self) -> None:
        done = run("nonfinite", "gloo")
        self.assertEqual(done.returncode, 65, done.stderr)
        self.assertIn("[NONFINITE] 2 steps in a row had no finite gradient", done.stderr)


if __name__ == "__main__":
    tier.main()
