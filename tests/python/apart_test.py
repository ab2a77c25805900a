"""Two hosts without MPI, as network namespaces: zeroth-run starts the ranks over ssh or node by node, and the default
world is a group of torch.distributed, with the bits of one host whose ranks are in the same nodes. Each host's own name
leads to its loopback. A cable that is cut is named."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import unittest

import forked
import hosts
import job
import tier

PROGRAM = str(job.HERE / "mpi_rank.py")
TRAINER = str(job.HERE.parents[1] / "examples" / "gpt" / "train.py")


def variables(**more: str) -> dict[str, str]:
    """As a user has them: which interface is gloo's is for the ranks to find."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ZEROTH_JOB_ID", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    }
    return {**own, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "0", **more}


class Jobs(contextlib.ExitStack):
    """`with Jobs() as jobs:` two hosts, and the families of what is started on them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.enter_context(hosts.Hosts(2))

    def over_ssh(
        self, *program: str, how: str = "--hostfile", names: str = "", says_address: bool = True, **more: str
    ) -> job.Family:
        """The head is on neither host. `how`: or "--hosts". `names`: of the hosts, without their number; their
        addresses by default."""
        two = [(names or self.net.net + ".") + str(number) for number in (1, 2)]
        hostfile = pathlib.Path(self.net.folder.name, "hosts")
        hostfile.write_text("".join(f"{host} slots=2\n" for host in two))
        command = [
            job.RUN,
            "--no-merge",
            how,
            str(hostfile) if how == "--hostfile" else ",".join(f"{host}:2" for host in two),
            "--ssh",
            str(self.net.ssh(says_address=says_address)),
            "--remote-program",
            job.RUN,
            "--lost-after",
            "60",
            *forked.python(),
            *program,
        ]
        return self.enter_context(job.Family(command, variables(**more)))

    def nodes(self, *program: str, place: str = "", **more: str) -> list[job.Family]:
        """One zeroth-run a host, the head first: one line that both run, as the pods of an Indexed Job do."""
        secret = pathlib.Path(self.net.folder.name, "secret")
        secret.write_text("a secret of enough bytes")
        line = (
            f"exec {job.RUN} --no-merge -n 2 --nnodes 2 --node-rank $JOB_COMPLETION_INDEX --rdzv {place or self.net.net + '.1:29400'} "  # noqa: E501
            f'--rdzv-secret-file {secret} --lost-after 60 "$@"'
        )
        command = ["sh", "-c", line, "sh", *forked.python(), *program]
        return [
            self.enter_context(
                job.Family([*self.net.inside(node + 1), *command], variables(JOB_COMPLETION_INDEX=str(node), **more))
            )
            for node in (0, 1)
        ]


class TwoHosts(unittest.TestCase):
    def setUp(self) -> None:
        self.jobs = self.enterContext(Jobs())

    def losses(self, done: subprocess.CompletedProcess[str], kind: str) -> str:
        """Of the four stages, the same on all ranks."""
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = re.findall(rf"(\d) of 4 over {re.escape(kind)}, stage (\d): (.*)", done.stdout)
        self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 16, done.stdout)
        self.assertEqual(len({losses for _, _, losses in told}), 1, done.stdout)
        return told[0][2]

    def on_one_host(self) -> str:
        """With its ranks in the same nodes."""
        command = [job.RUN, "-n", "4", "--no-merge", *forked.python(), PROGRAM]
        return self.losses(
            subprocess.run(
                command, env=variables(RANKS_PER_NODE="2"), capture_output=True, text=True, timeout=240, check=False
            ),
            "shm",
        )

    def test_ranks_of_a_hostfile_train_with_the_bits_of_one_host(self) -> None:
        family = self.jobs.over_ssh(PROGRAM, names="host-")
        done = family.end(240)
        self.assertEqual(family.left.text(), "")
        self.assertEqual(self.losses(done, "c10d gloo"), self.on_one_host())
        self.assertIn("info: 4 ranks over c10d gloo, says torch.distributed", done.stderr)
        self.assertIn("info: ranks of a node share its memory: calls go over shm+c10d gloo", done.stderr)
        shared = {between for _, between in re.findall(r"payload (\d+) between nodes (\d+)", done.stderr)}
        self.assertNotIn("0", shared, "nothing is counted between the hosts")

    @tier.long
    def test_ranks_of_nodes_train_with_the_bits_of_one_host(self) -> None:
        head, other = self.jobs.nodes(PROGRAM, place="host-1:29400")
        done = head.end(240)
        self.assertEqual(other.end(30).returncode, 0)
        self.assertEqual(self.losses(done, "c10d gloo"), self.on_one_host())

    @tier.long
    def test_the_trainer_needs_nothing_more(self) -> None:
        folder = pathlib.Path(self.jobs.net.folder.name)
        (folder / "text.txt").write_text(
            "the cat that sat on the mat sees a rat and the rat sees that the cat is fat\n" * 80
        )
        arguments = [
            TRAINER,
            "--data",
            str(folder),
            "--suffix",
            "text.txt",
            "--layers",
            "1",
            "--d-model",
            "32",
            "--heads",
            "2",
            "--seq",
            "32",
            "--batch",
            "2",
            "--eval-windows",
            "3",
            "--zero-stage",
            "3",
            "--steps",
            "3",
            "--json",
        ]
        done = self.jobs.over_ssh(*arguments, str(folder / "hosts.json"), how="--hosts").end(240)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        (folder / "nodes.json").write_text('{"zeroth": {"ranks_per_node": 2}}')
        alone = subprocess.run(
            [
                job.RUN,
                "-n",
                "4",
                *forked.python(),
                *arguments,
                str(folder / "host.json"),
                "--config",
                str(folder / "nodes.json"),
            ],
            env=variables(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        self.assertEqual(alone.returncode, 0, alone.stdout + alone.stderr)
        losses = [
            re.findall(r'"loss_hex": *"([^"]+)"', (folder / name).read_text()) for name in ("hosts.json", "host.json")
        ]
        self.assertEqual(len(losses[0]), 3)
        self.assertEqual(losses[0], losses[1])

    @tier.both
    def test_a_cable_that_is_cut_is_named_by_the_control_plane(self) -> None:
        starts = (lambda: self.jobs.over_ssh(PROGRAM, "for ever"), lambda: self.jobs.nodes(PROGRAM, "for ever")[0])
        for start in tier.rows(starts, starts[1:]):
            with self.subTest(start):
                self.jobs.close()
                self.jobs = self.enterContext(Jobs())
                head = start()
                head.wait_for("trained", 4)
                self.jobs.net.cut(2)
                self.assertRegex(hosts.verdict(head), hosts.LOST_OVER_A_CUT_CABLE)


def main() -> int:
    reason = hosts.why_not()
    if reason:
        print(f"SKIPPED: {reason}")
        return 77
    return tier.run()


if __name__ == "__main__":
    sys.exit(main())
