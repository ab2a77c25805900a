"""Ranks under a real mpirun: over shared memory and over MPI they train with the same bits at every stage; what goes
wrong on one ends all, and nothing is left."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

import forked
import job
import tier

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/docs"))

from blocks import all_blocks  # noqa: E402

PROGRAM = str(job.HERE / "mpi_rank.py")
MPIRUN = [os.environ["ZEROTH_MPIRUN"], "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,vader"]


def variables(**more: str) -> dict[str, str]:
    """Without what another launcher says."""
    own = {name: value for name, value in os.environ.items() if name not in ("ZEROTH_JOB_ID", "RANK", "WORLD_SIZE")}
    return {**own, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **more}


Trained = tuple[str, dict[tuple[int, int], tuple[int, int]]]
REFERENCES: dict[tuple[int, int], Trained] = {}
"""of trainings over shared memory, by ranks and ranks on a node: several tests compare with the same one"""


def bytes_of(text: str) -> dict[tuple[int, int], tuple[int, int]]:
    """By rank and stage: in all, and between nodes."""
    return {
        (int(rank), int(stage)): (int(payload), int(between))
        for rank, stage, payload, between in re.findall(r"rank (\d) stage (\d) payload (\d+) between nodes (\d+)", text)
    }


NO_DEGREE, DEGREE_2 = "{2.0}", "{1.0}"
"""what the numbers of sums_rank.py sum to, over all ranks in each micro-step or over micro-steps in pairs first"""


def sums_of(text: str) -> list[str]:
    """Of each rank."""
    return re.findall(r"rank \d has sums of (.*)", text)


class Mpirun(unittest.TestCase):
    def run_ranks(
        self,
        ranks: int,
        *arguments: str,
        backend: str,
        per_node: int = 0,
        limit_s: float = 240,
        more: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [*MPIRUN, "-n", str(ranks), *forked.python(), PROGRAM, *arguments]
        with job.Family(
            command, variables(ZEROTH_BACKEND=backend, RANKS_PER_NODE=str(per_node), **(more or {}))
        ) as family:
            return family.end(limit_s)

    def reference(self, ranks: int, per_node: int = 0) -> Trained:
        """Over shared memory."""
        if (ranks, per_node) not in REFERENCES:
            REFERENCES[ranks, per_node] = self.trained(ranks, "", per_node)
        return REFERENCES[ranks, per_node]

    def trained(self, ranks: int, backend: str, per_node: int = 0, more: dict[str, str] | None = None) -> Trained:
        """Losses, the same on every rank, at every stage; and bytes by rank and stage, in all and between nodes."""
        done = self.run_ranks(ranks, backend=backend, per_node=per_node, more=more)
        self.assertEqual("zeroth.reduction = transport" in done.stderr, "REDUCTION" in (more or {}), done.stderr)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = re.findall(rf"(\d) of {ranks} over {re.escape(backend or 'shm')}, stage (\d): (.*)", done.stdout)
        self.assertEqual(sorted(told)[0][:2], ("0", "0"), done.stdout)
        self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 4 * ranks, done.stdout)
        self.assertEqual(len({losses for _, _, losses in told}), 1, done.stdout)
        kind = backend or "shm"
        self.assertIn(
            f"info: {ranks} ranks over {kind}, says OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (mpirun)", done.stderr
        )
        if per_node == 2:
            self.assertEqual(sums_of(done.stdout), [DEGREE_2 if "DEGREES" in (more or {}) else NO_DEGREE] * ranks)
        counted = bytes_of(done.stderr)
        self.assertEqual(len(counted), 4 * ranks, done.stderr)
        return told[0][2], counted

    def test_two_levels_have_the_bits_of_shared_memory_with_these_nodes_and_cross_between_them_once(self) -> None:
        flat, bytes_flat = self.reference(4, per_node=2)
        levels, bytes_levels = self.trained(4, "shm+mpi", per_node=2)
        self.assertEqual(levels, flat)
        for key, (_, between) in bytes_levels.items():  # what exactly: comm_collectives
            self.assertLess(between, 0.6 * bytes_flat[key][1], key)

    def test_degrees_of_sharding_have_the_bits_of_shared_memory_and_cross_between_nodes_less(self) -> None:
        degrees = {"DEGREES": "1"}
        flat, _ = self.trained(4, "", per_node=2, more=degrees)
        messages, _ = self.trained(4, "mpi", per_node=2, more=degrees)
        levels, bytes_levels = self.trained(4, "shm+mpi", per_node=2, more=degrees)
        self.assertEqual(messages, flat)
        self.assertEqual(levels, flat)
        for rank in range(4):  # in all there are two micro-steps, between nodes one sum of them
            payload, between = bytes_levels[rank, 1]
            self.assertLess(between, 0.45 * payload)

    @tier.both
    def test_the_bits_are_those_of_shared_memory(self) -> None:
        for ranks in tier.rows((2, 3), (3,)):
            self.assertEqual(self.trained(ranks, "mpi")[0], self.reference(ranks)[0])

    @tier.both
    def test_mpis_own_calls_give_few_ranks_the_same_bits(self) -> None:
        own_calls = {"REDUCTION": "transport"}
        checked = {**own_calls, "CHECK_CALLS": "1"}
        for more in tier.rows((own_calls, checked), (checked,)):
            self.assertEqual(self.trained(3, "mpi", more=more)[0], self.reference(3)[0])

    @tier.both
    def test_zeroth_run_starts_it(self) -> None:
        path = f"{os.path.dirname(MPIRUN[0])}:{os.environ['PATH']}"
        settings = variables(
            PATH=path, RANKS_PER_NODE="0", OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl="self,vader"
        )
        for backend in tier.rows(("shm", "mpi"), ("mpi",)):
            command = [
                job.RUN,
                "--launcher",
                "mpirun",
                "--bind-cores",
                "off",
                "-n",
                "2",
                "--env",
                f"ZEROTH_BACKEND={backend}",
                *forked.python(),
                PROGRAM,
            ]
            with self.subTest(backend=backend), job.Family(command, settings) as family:
                done = family.end(240)
                self.assertEqual(family.left.text(), "")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn(
                    f"zeroth-run: ZEROTH_BACKEND={backend} mpirun -n 2 --bind-to none -x ZEROTH_BACKEND ", done.stderr
                )
                told = re.findall(rf"(\d) of 2 over {backend}, stage (\d): (.*)", done.stdout)
                self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 8, done.stdout)
                self.assertEqual({losses for _, _, losses in told}, {self.reference(2)[0]})

    @tier.long
    def test_a_rank_that_gives_up_tells_the_others_why(self) -> None:
        done = self.run_ranks(3, "tell", backend="mpi")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"\[ABORTED\] rank 1 stopped the job: .*the data set has ended")

    @tier.long
    def test_an_exception_on_one_rank_ends_the_job(self) -> None:
        done = self.run_ranks(3, "raise", backend="mpi")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("RuntimeError: the data set has ended", done.stderr)

    def test_a_rank_that_dies_ends_the_job(self) -> None:
        begin = time.monotonic()
        done = self.run_ranks(3, "kill", backend="mpi")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"rank 1 with PID \d+ on node .* exited on signal 9")
        self.assertLess(time.monotonic() - begin, 60)

    @tier.long
    def test_a_rank_that_waits_for_ever_is_named(self) -> None:
        done = self.run_ranks(2, "freeze", backend="mpi")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(
            done.stderr,
            r"\[TIMEOUT\] no answer within 20\.0 s: rank 1 \(pid \d+ on \S+\) is between steps, .*at \S+mpi_rank\.py:\d+ in have, "  # noqa: E501
            r".*who: rank 0/2(, [^;]+)?; expected: rank 0 waits for ",
        )

    def test_ranks_of_another_launcher_are_no_world_of_mpi(self) -> None:
        command = [job.RUN, "-n", "2", "--no-merge", *forked.python(), PROGRAM]
        with job.Family(command, variables(ZEROTH_BACKEND="mpi")) as family:
            # Open MPI keeps files while a process runs, and zeroth-run ends the second rank, which is as wrong, right
            # after the first.
            done = family.end(120, may_leave="/ompi.")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(
            done.stderr,
            r"\[MISMATCH\] MPI and the launcher's variables describe different worlds; .*start the ranks with mpirun",
        )

    def test_a_library_that_is_not_there(self) -> None:
        done = subprocess.run(
            [
                *forked.python(),
                "-c",
                "import zeroth, torch; zeroth.Engine(torch.nn.Linear(2, 2), {'optimizer': {'type': 'AdamW'}})",
            ],
            env=variables(ZEROTH_BACKEND="mpi", ZEROTH_MPI_LIBRARY="/no/such/library.so"),
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertRegex(
            done.stderr,
            r"\[ENVIRONMENT\] MPI was asked for, and libzeroth_mpi\.so cannot be loaded; .*/no/such/library\.so",
        )


class Mixtures(unittest.TestCase):
    @tier.both
    def test_a_measured_table_says_which_backend_makes_which_call(self) -> None:
        bench = str(pathlib.Path(os.environ["ZEROTH_RUN"]).with_name("zeroth-bench"))
        with tempfile.TemporaryDirectory() as folder:
            table = pathlib.Path(folder, "calls.json")
            asked = ["--backends", "shm,mpi", "--sizes", "4KiB,64KiB", "--rounds", "3", "--tune", str(table)]
            command = [*MPIRUN, "-n", "2", bench, "comm", *asked]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=variables())
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertRegex(done.stdout, r"all_gather +4096 +\d+\.\d +\d+\.\d\n")
            rows = json.loads(table.read_text())["rows"]
            self.assertEqual(
                {row["call"] for row in rows},
                {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"},
            )
            self.assertLessEqual({row["backend"] for row in rows}, {"shm", "mpi"})
            # Whatever was measured: neighbours on different backends.
            both = ["shm", "mpi"]
            mixed = []
            for call in ("all_reduce", "all_gather"):
                mixed += [
                    {"call": call, "up_to_bytes": bound, "backend": both[index % 2]}
                    for index, bound in enumerate((64, 512, 4096))
                ]
                mixed.append({"call": call, "backend": "mpi"})
            mixed += [{"call": "reduce_scatter", "backend": "shm"}, {"call": "barrier", "backend": "mpi"}]
            documented = [
                block.text for block in all_blocks(ROOT) if block.language == "json" and "zeroth_calls" in block.text
            ]
            self.assertTrue(documented)
            alone = Mpirun().reference(2)[0]
            alternating = json.dumps({"zeroth_calls": 1, "rows": mixed})
            of_pages = [("shm|mpi", text) for text in documented]
            every = [("shm|mpi", alternating), ("mpi|shm", alternating), *of_pages]
            for backend, text in tier.rows(every, [("mpi|shm", alternating), *of_pages]):
                with self.subTest(backend, text=text):
                    table.write_text(text)
                    done = self.trained(backend, str(table))
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    told = re.findall(rf"\d of 2 over {re.escape(backend)}, stage \d: (.*)", done.stdout)
                    self.assertEqual((len(told), set(told)), (8, {alone}), done.stdout)

    def test_a_table_that_is_not_there_is_named(self) -> None:
        for table, text in (
            ("", "a mixture of backends needs a table"),
            ("/does/not/exist", "the call table cannot be read; where: comm.mixed; which: /does/not/exist"),
        ):
            with self.subTest(table):
                done = self.trained("shm|mpi", table)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn("[CONFIG] " + text, done.stderr)

    def trained(self, backend: str, table: str) -> subprocess.CompletedProcess[str]:
        with job.Family(
            [*MPIRUN, "-n", "2", *forked.python(), PROGRAM],
            variables(ZEROTH_BACKEND=backend, ZEROTH_CALL_TABLE=table, RANKS_PER_NODE="0"),
        ) as family:
            return family.end(240)


if __name__ == "__main__":
    tier.main()
