"""Engines over torch's gloo group: the bits of shared memory, and what happens when ranks do not do the same."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import unittest

import forked
import job
import ports
import tier

HERE = pathlib.Path(__file__).resolve().parent


class Parity(job.RankTest):
    def test_every_stage_with_every_dtype(self) -> None:
        self.assertIn("8 trainings: ok", self.run_well(2, "c10d_rank.py", "--short"))

    @tier.long
    def test_all_models_on_two_ranks(self) -> None:
        self.assertIn("160 trainings: ok", self.run_well(2, "c10d_rank.py", limit_s=600))

    @tier.long
    def test_three_ranks(self) -> None:
        self.run_well(3, "c10d_rank.py", "nested", "reused", "odd", "normed")

    @tier.long
    def test_four_ranks(self) -> None:
        self.run_well(4, "c10d_rank.py", "plain", "reused", "checkpoint", "odd")


class Levels(job.RankTest):
    """Nodes of two ranks: shared memory inside each, gloo between them."""

    def trained(self, **variables: str) -> tuple[str, dict[str, tuple[int, int]], str]:
        """Losses, the same on all ranks; bytes by rank and stage, in all and between nodes; and the log."""
        done = subprocess.run(
            job.command(4, "mpi_rank.py"),
            env={**os.environ, "RANKS_PER_NODE": "2", **variables},
            capture_output=True,
            text=True,
            timeout=job.TIME_LIMIT_S,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = re.findall(r"of 4 over (?:shm|c10d gloo), stage \d: (.*)", done.stdout)
        self.assertEqual((len(told), len(set(told))), (16, 1), done.stdout)
        if variables.get("RANKS_PER_NODE", "2") == "2":  # 2^24 + 1 and so on: see sums_rank.py
            sums = "{1.0}" if "DEGREES" in variables else "{2.0}"
            self.assertEqual(re.findall(r"rank \d has sums of (.*)", done.stdout), [sums] * 4)
        found = re.findall(r"(rank \d stage \d) payload (\d+) between nodes (\d+)", done.stderr)
        return told[0], {key: (int(payload), int(between)) for key, payload, between in found}, done.stderr

    @tier.both
    def test_they_have_the_bits_of_shared_memory_and_cross_between_nodes_once(self) -> None:
        every = ({}, {"DEGREES": "1"})
        for more in tier.rows(every, every[:1]):
            with self.subTest(more):
                flat, bytes_flat, _ = self.trained(**more)
                levels, bytes_levels, log = self.trained(GROUP="1", **more)
                self.assertIn("info: ranks of a node share its memory: calls go over shm+c10d gloo", log)
                self.assertEqual(levels, flat)
                self.assertEqual(len(bytes_levels), 16)
                if not more:
                    for key, (_, between) in bytes_levels.items():  # what exactly: comm_collectives
                        self.assertLess(between, 0.6 * bytes_flat[key][1], key)

    @tier.long
    def test_without_nodes_one_host_has_one_level(self) -> None:
        flat, _, log = self.trained(GROUP="1", RANKS_PER_NODE="0")
        self.assertNotIn("share its memory", log)
        self.assertEqual(flat, self.trained(RANKS_PER_NODE="0")[0])


class Trouble(job.RankTest):
    @tier.both
    def test_a_unit_that_one_rank_skips_is_named_on_all(self) -> None:
        for stage in tier.rows((1, 3), (3,)):
            with self.subTest(stage=stage):
                done = job.run(3, "c10d_trouble_rank.py", "skip", str(stage))
                self.assertEqual(done.returncode, 1, done.stderr)
                for rank in range(3):
                    self.assertRegex(
                        done.stdout,
                        rf"rank {rank} is told: \[MISMATCH\] ranks make different calls.*unit blocks\.2 on rank",
                    )

    @tier.long
    def test_over_two_levels_the_other_node_is_told_too(self) -> None:
        done = job.run(4, "c10d_trouble_rank.py", "skip", "3", "2")
        self.assertEqual(done.returncode, 1, done.stderr)
        for rank in range(4):
            self.assertRegex(
                done.stdout,
                rf"rank {rank} is told: \[MISMATCH\] ranks make different calls; where: comm\.shm .*unit blocks\.2 on rank",  # noqa: E501
            )

    @tier.long
    def test_a_killed_rank_is_named(self) -> None:
        done = job.run(2, "c10d_trouble_rank.py", "kill")
        self.assertEqual(done.returncode, 128 + signal.SIGKILL)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    @tier.both
    def test_every_failpoint_of_the_transport_ends_both_ranks(self) -> None:
        listed = subprocess.run(
            [job.RUN, "--list-failpoints"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        sites = re.findall(r"^(c10d\.\w+)", listed, re.MULTILINE)
        self.assertEqual(sites, ["c10d.send", "c10d.recv"])
        every = list(itertools.product(sites, (0, 1), ("kill", "throw")))
        few = [("c10d.send", 0, "kill"), ("c10d.recv", 1, "throw")]
        for site, rank, action in tier.rows(every, few):
            rule = f"{site}@rank={rank},hit=9:{action}"
            command = job.command(2, "c10d_trouble_rank.py", "kill")
            with self.subTest(rule), job.Family(command, os.environ | {"ZEROTH_FAULTS": rule}) as family:
                done = family.end(60)
                last = done.stderr.strip().splitlines()[-1]
                if action == "kill":
                    self.assertRegex(last, rf"rank {rank} \(pid \d+\) was killed by signal 9")
                else:
                    self.assertRegex(done.stderr, rf"\[INTERNAL\] planted failure at {re.escape(site)}")
                    self.assertRegex(last, rf"rank {rank} \(pid \d+\) exited with code 70")

    def test_a_rank_that_left_is_named(self) -> None:
        done = job.run(2, "c10d_trouble_rank.py", "leave")
        self.assertEqual(done.returncode, 76, done.stderr)
        self.assertRegex(
            done.stderr, r"\[PEER_LOST\] rank 1 \(pid \d+ on \S+\) exited with code 0 before the others were done"
        )

    @tier.long
    def test_an_exception_on_one_rank_is_named_first(self) -> None:
        self.rank_1_is_named_first("c10d_trouble_rank.py", "exception")


class Groups(job.RankTest):
    def test_exports_are_the_same_files(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.run_well(2, "c10d_trouble_rank.py", "export", folder)

    def test_a_group_of_some_ranks(self) -> None:
        self.run_well(3, "c10d_trouble_rank.py", "subgroup")

    def test_two_worlds_of_a_group_have_messages_of_their_own(self) -> None:
        self.run_well(2, "c10d_trouble_rank.py", "worlds")

    def test_a_group_without_cpu_tensors_gets_gloo_beside_it(self) -> None:
        self.run_well(2, "c10d_trouble_rank.py", "beside")

    def test_wire_and_memory_are_the_plan(self) -> None:
        self.run_well(2, "c10d_trouble_rank.py", "wire")

    def test_gradients_that_do_not_fit_their_buckets_are_reported(self) -> None:
        self.run_well(2, "c10d_trouble_rank.py", "wide")

    def test_ranks_of_two_hosts(self) -> None:
        # Two nodes of one rank each, as torchrun would start them on two hosts.
        variables = {name: value for name, value in os.environ.items() if name != "ZEROTH_JOB_ID"}
        port = ports.free_port()
        program = [*forked.python(), str(HERE / "c10d_trouble_rank.py"), "wire"]
        ranks = [
            subprocess.Popen(
                program,
                env=variables
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            with rank:
                output = rank.communicate(timeout=120)[0]
                self.assertEqual(rank.returncode, 0, output)


class Refusals(unittest.TestCase):
    def run_python(self, text: str, **variables: str) -> str:
        done = subprocess.run(
            [*forked.python(), "-c", "import torch, zeroth, torch.distributed as dist\n" + text],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertNotEqual(done.returncode, 0, done.stdout)
        return re.sub(r"\s+", " ", done.stderr)

    def test_several_hosts_are_told_about_groups(self) -> None:
        text = self.run_python("zeroth.World.from_environment()", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
        self.assertRegex(
            text, r"\[ENVIRONMENT\] the ranks are on several hosts.*MASTER_ADDR and MASTER_PORT.*init_process_group"
        )

    def test_an_address_of_rank_0_that_does_not_lead_out_is_named(self) -> None:
        for address, got in (("127.0.1.1", r"got: loopback, 127\.0\."), ("no.such.host.invalid", "got: no such host")):
            text = self.run_python(
                "zeroth.Engine(torch.nn.Linear(2, 2))",
                RANK="0",
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR=address,
                MASTER_PORT="1",
                GLOO_SOCKET_IFNAME="",
            )
            self.assertRegex(
                text,
                rf"\[ENVIRONMENT\] the ranks are on several hosts, and rank 0's address does not lead.*MASTER_ADDR={address}.*{got}",  # noqa: E501
            )

    def test_a_group_that_is_there_is_the_world_of_several_hosts(self) -> None:
        variables = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        group = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        text = self.run_python(group + "raise SystemExit(repr(zeroth.World.from_environment()))", RANK="0", **variables)
        self.assertIn("zeroth.World(rank=0, size=1, backend='c10d gloo')", text)
        text = self.run_python(group + "zeroth.World.from_environment()", RANK="0", **{**variables, "WORLD_SIZE": "3"})
        self.assertRegex(
            text, r"\[ENVIRONMENT\] torch\.distributed and the environment speak of different worlds.*rank 0 of 3"
        )

    def test_a_group_must_be_there(self) -> None:
        self.assertRegex(
            self.run_python("zeroth.World.from_group()"), r"\[USAGE\] torch\.distributed is not initialised"
        )

    def test_two_worlds_are_refused(self) -> None:
        text = self.run_python(
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            "zeroth.Engine(torch.nn.Linear(2, 2), {'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}}})",
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
        self.assertRegex(text, r"\[ENVIRONMENT\] torch\.distributed and the environment speak of different worlds")


if __name__ == "__main__":
    tier.main()
