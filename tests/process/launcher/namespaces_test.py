"""Two hosts as network namespaces: ssh is replaced by a program that enters one, over the network between them; nodes
find each other there; and a cable that is cut. Needs root."""

from __future__ import annotations

import pathlib
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import hosts  # noqa: E402
import launching  # noqa: E402
from launching import PROBE, SECRET, Run, Stage  # noqa: E402

LOST_AFTER_S = 3


class Namespaces(unittest.TestCase):
    def setUp(self) -> None:
        self.net = hosts.Hosts(2)
        self.net.__enter__()
        self.addCleanup(self.net.__exit__)
        self.stage = Stage()
        self.stage.__enter__()
        self.addCleanup(self.stage.__exit__)
        self.ssh = self.net.ssh()

    def over_ssh(self, *program: str) -> Run:
        return self.stage.run(
            "--no-merge",
            "--hosts",
            f"{self.net.net}.1:2,{self.net.net}.2:2",
            "--lost-after",
            str(LOST_AFTER_S),
            "--remote-program",
            launching.RUN,
            *program,
            ZEROTH_SSH=str(self.ssh),
        )

    def node(self, number: int, *program: str) -> Run:
        """In its namespace."""
        enter = ("ip", "netns", "exec", f"{self.net.name}h{number + 1}", "unshare", "--uts", "--mount")
        return self.stage.run(
            "--no-merge",
            "-n",
            "2",
            "--nnodes",
            "2",
            "--node-rank",
            str(number),
            "--rdzv",
            f"{self.net.net}.1:29400",
            "--lost-after",
            str(LOST_AFTER_S),
            *program,
            prefix=enter,
            ZEROTH_RDZV_SECRET=SECRET,
        )

    def test_ranks_over_ssh_reach_rank_zero_at_the_address_they_are_given(self) -> None:
        """MASTER_ADDR and MASTER_PORT, as torch.distributed uses them."""
        meet = (
            "import os, socket\n"
            "place = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
            "if os.environ['RANK'] == '0':\n"
            "    server = socket.create_server(place)\n"
            "    print(sorted(server.accept()[0].recv(1).decode() for _ in range(3)))\n"
            "else:\n"
            "    import time\n"
            "    for _ in range(100):\n"
            "        try:\n"
            "            socket.create_connection(place, 5).sendall(os.environ['RANK'].encode())\n"
            "            break\n"
            "        except ConnectionRefusedError:\n"
            "            time.sleep(0.1)\n"
        )
        for runs in (
            [self.over_ssh(sys.executable, "-c", meet)],
            [self.node(0, sys.executable, "-c", meet), self.node(1, sys.executable, "-c", meet)],
        ):
            self.assertEqual([run.code() for run in runs], [0] * len(runs), runs[0].err)
            self.assertEqual(runs[0].out, "[0] ['1', '2', '3']\n")

    def test_hosts_whose_own_names_lead_to_loopback_give_rank_zero_an_address(self) -> None:
        """Debian's 127.0.1.1: rank 0 would bind, and gloo advertise, what nobody else reaches."""
        say = (sys.executable, "-c", "import os; print(os.environ['MASTER_ADDR'])")
        names = ("--hosts", "host-1:1,host-2:1", "--remote-program", launching.RUN)
        run = self.stage.run("--no-merge", *names, *say, ZEROTH_SSH=str(self.net.ssh()))
        self.assertEqual((run.code(), run.err), (0, ""))
        self.assertEqual(sorted(run.out.splitlines()), [f"[{rank}] {self.net.net}.1" for rank in (0, 1)])
        # Where nothing tells the address: the name, and a warning.
        run = self.stage.run("--no-merge", *names, *say, ZEROTH_SSH=str(self.net.ssh(says_address=False)))
        self.assertEqual(run.code(), 0, run.err)
        self.assertEqual(sorted(run.out.splitlines()), ["[0] host-1", "[1] host-1"])
        self.assertRegex(
            run.err,
            r"zeroth-run: host host-1: \[LAUNCH\] warning: MASTER_ADDR=host-1 leads to loopback here \(127\.0\.\d\.1\), .*/etc/hosts",  # noqa: E501
        )
        # Node by node: where the others have come to.
        nodes = [
            self.stage.run(
                "--no-merge",
                "-n",
                "1",
                "--nnodes",
                "2",
                "--node-rank",
                str(node),
                "--rdzv",
                "host-1:29400",
                *say,
                prefix=self.net.inside(node + 1),
                ZEROTH_RDZV_SECRET=SECRET,
            )
            for node in (0, 1)
        ]
        self.assertEqual([node.code() for node in nodes], [0, 0], nodes[0].err)
        self.assertEqual(sorted(nodes[0].out.splitlines()), [f"[0] {self.net.net}.1", "[1] host-1"])

    def test_a_cable_cut_under_ssh_names_the_host_and_ends_both_sides(self) -> None:
        head = self.over_ssh(PROBE, "wait", "ignore", "child")
        head.pids("READY", 4)
        self.cut_and_expect(
            head, f"host {self.net.net}.2 (ranks 2-3): [PEER_LOST] no word from the host for {LOST_AFTER_S} s"
        )

    def test_a_cable_cut_between_nodes_names_the_node_and_ends_both_sides(self) -> None:
        head, other = self.node(0, PROBE, "wait", "ignore", "child"), self.node(1, PROBE, "wait", "ignore", "child")
        head.pids("READY", 4)
        self.cut_and_expect(head, "/node1 (ranks 2-3): [PEER_LOST] ", other)
        self.assertIn("the head of the job has gone; the ranks of this node were ended", other.err)

    def cut_and_expect(self, head: Run, said: str, *others: Run) -> None:
        begin = time.monotonic()
        self.net.cut(2)
        self.assertEqual(head.code(), 76)
        self.assertLess(time.monotonic() - begin, LOST_AFTER_S + 5)
        self.assertIn(said, head.err)
        self.assertIn("; 2 other ranks were ended.", head.err)
        self.assertEqual([other.code() for other in others], [76] * len(others))
        self.assertEqual(self.stage.left(LOST_AFTER_S + 5), "", "ranks behind the cut live on")

    def test_a_host_behind_a_cut_cable_cannot_take_part(self) -> None:
        self.net.cut(2)
        head = self.node(0, PROBE, "wait")
        other = self.node(1, "--connect-timeout", "3", PROBE, "wait")
        self.assertEqual(other.code(), 69)
        self.assertRegex(other.err, r"the head did not answer for \d s: (Connection timed out|No route to host)")
        head.kill()


def main() -> int:
    reason = hosts.why_not()
    if reason:
        print(f"SKIPPED: {reason}")
        return 77
    return 0 if unittest.main(verbosity=2, exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
