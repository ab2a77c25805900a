"""zeroth-run --nnodes: nodes that are started one by one, strangers at the door, nodes that are late, wrong or lost."""

from __future__ import annotations

import hmac
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

import launching
import ports
from launching import PATIENCE_S, PROBE, SECRET, Run, Stage


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def text(value: bytes) -> bytes:
    return len(value).to_bytes(4, "little") + value


def frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + bytes([kind]) + payload


class FalseNode:
    """Knows the secret, and then says what it should not. Node 1 of 2 with one rank."""

    HELLO, TASK, STARTED, OUTPUT, RANK_END, PING, CHALLENGE, PROOF = 1, 2, 3, 5, 7, 11, 14, 15

    def __init__(self, port: int) -> None:
        version = subprocess.run([launching.RUN, "--version"], capture_output=True, check=True).stdout.split()[1]
        self.stream = socket.create_connection(("127.0.0.1", port), 10)
        own = b"n" * 16
        self.stream.sendall(b"ZEROTHAG\x01\0\0\0" + frame(self.CHALLENGE, own))
        self.take(12)
        nonce = self.await_frame(self.CHALLENGE)
        self.stream.sendall(frame(self.PROOF, hmac.digest(SECRET.encode(), b"zeroth-run node" + nonce + own, "sha256")))
        self.await_frame(self.PROOF)
        self.stream.sendall(
            frame(
                self.HELLO, text(version) + text(b"false") + number(0) + number(1) + number(1) + number(2) + text(b"")
            )
        )
        self.await_frame(self.TASK)

    def take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += (part := self.stream.recv(count - len(data)))
            if not part:
                raise AssertionError("the head has closed the connection")
        return data

    def await_frame(self, kind: int) -> bytes:
        while True:
            header = self.take(5)
            payload = self.take(int.from_bytes(header[:4], "little"))
            if header[4] == kind:
                return payload

    def say(self, kind: int, payload: bytes) -> None:
        self.stream.sendall(frame(kind, payload))


class Nodes(unittest.TestCase):
    def setUp(self) -> None:
        self.stage = Stage()
        self.stage.__enter__()
        self.addCleanup(self.stage.__exit__)
        self.port = ports.free_port()

    def node(
        self,
        number: int,
        *arguments: str,
        of: int = 2,
        ranks: int = 1,
        options: tuple[str, ...] = (),
        secret: str = SECRET,
        **environment: str,
    ) -> Run:
        return self.stage.run(
            "-n",
            str(ranks),
            "--no-merge",
            "--nnodes",
            str(of),
            "--node-rank",
            str(number),
            "--rdzv",
            f"127.0.0.1:{self.port}",
            *options,
            *(arguments or (PROBE, "wait")),
            ZEROTH_RDZV_SECRET=secret,
            **environment,
        )

    def assert_waited(self, run: Run, pattern: str, seconds: range, late_s: float) -> None:
        """It says `pattern`, with the seconds that it has waited: one of `seconds`, or a later one where the machine
        stood still, as it must have done for `late_s` in all."""
        self.assertRegex(run.err, pattern)
        said = int(re.search(pattern, run.err)[1])  # type: ignore[index]
        self.assertIn(said, range(seconds.start, seconds.stop + max(0, int(late_s))))

    def test_ranks_find_their_place(self) -> None:
        say = (
            "sh",
            "-c",
            "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR ${ZEROTH_RDZV_SECRET-none}",
        )
        nodes = [self.node(number, *say, of=3, ranks=ranks) for number, ranks in ((2, 1), (0, 2), (1, 3))]
        self.assertEqual([node.code() for node in nodes], [0, 0, 0], nodes[1].err)
        places = ["0/6 0/2 0", "1/6 1/2 0", "2/6 0/3 1", "3/6 1/3 1", "4/6 2/3 1", "5/6 0/1 2"]
        self.assertEqual(
            sorted(nodes[1].out.splitlines()), [f"[{rank}] {place} 127.0.0.1 none" for rank, place in enumerate(places)]
        )
        self.assertEqual(self.stage.left(), "")

    def test_an_address_of_ipv6(self) -> None:
        try:
            with socket.create_server(("::1", 0), family=socket.AF_INET6):
                pass
        except OSError:
            self.skipTest("not permitted: no ::1 here")
        nodes = [
            self.stage.run(
                "-n",
                "1",
                "--nnodes",
                "2",
                "--node-rank",
                str(number),
                "--rdzv",
                f"[::1]:{self.port}",
                "sh",
                "-c",
                "echo $MASTER_ADDR",
                ZEROTH_RDZV_SECRET=SECRET,
            )
            for number in range(2)
        ]
        self.assertEqual([node.code() for node in nodes], [0, 0], nodes[0].err)
        self.assertEqual(nodes[0].out, "[ranks 0-1] ::1\n")

    def test_every_node_exits_with_the_first_cause(self) -> None:
        head, other = self.node(0, PROBE, "wait", "exit=7"), self.node(1, PROBE, "wait", "exit=7", ranks=2)
        pids = head.pids("READY", 3)
        os.kill(pids[2], signal.SIGUSR1)
        self.assertEqual((head.code(), other.code()), (7, 7))
        for run in (head, other):
            self.assertRegex(
                run.err,
                rf"zeroth-run: rank 2 \(pid {pids[2]} on .*/node1\) exited with code 7; the other 2 ranks were ended\.\n",  # noqa: E501
            )
        self.assertEqual(self.stage.left(), "")

    def test_a_failed_job_is_started_again_on_all_nodes(self) -> None:
        say = (
            "sh",
            "-c",
            "[ $ZEROTH_RESTART_COUNT = 2 ] && echo $RANK of $WORLD_SIZE; [ $ZEROTH_RESTART_COUNT = 2 ] || exit 5",
        )
        nodes = [self.node(number, *say, of=3, options=("--max-restarts", "2")) for number in range(3)]
        self.assertEqual([node.code() for node in nodes], [0, 0, 0], nodes[0].err)
        self.assertEqual(sorted(nodes[0].out.splitlines()), ["[0] 0 of 3", "[1] 1 of 3", "[2] 2 of 3"])
        self.assertEqual(self.stage.left(), "")

    def test_a_lost_node_comes_back_for_the_next_start(self) -> None:
        say = ("sh", "-c", "echo START $ZEROTH_RESTART_COUNT; [ $ZEROTH_RESTART_COUNT = 1 ] || sleep 30")
        head, other = self.node(0, *say, options=("--max-restarts", "1")), self.node(1, *say)
        head.wait_for("START 0", 2)
        other.kill()
        head.wait_for("restart 1 of 1", stream="err")
        again = self.node(1, *say)  # as its scheduler would
        self.assertEqual((head.code(), again.code()), (0, 0), head.err)
        self.assertEqual(head.out.count("START 1"), 2)

    def test_a_node_that_dies_is_named(self) -> None:
        head, other = self.node(0), self.node(1, ranks=2)
        head.pids("READY", 3)
        other.kill()
        self.assertEqual(head.code(), 76)
        self.assertRegex(head.err, r"host .*/node1 \(ranks 1-2\): \[PEER_LOST\] the connection to the host has ended")
        self.assertEqual(self.stage.left(), "")

    def test_every_failpoint_of_the_launcher_ends_both_nodes(self) -> None:
        listed = subprocess.run(
            [launching.RUN, "--list-failpoints"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        ).stdout
        comes_by = {
            "join": (1,),
            "admit": (0,),
            "hello": (1,),
            "order": (0,),
            "task": (1,),
            "spawn": (0, 1),
            "output": (0, 1),
        }
        self.assertEqual(set(re.findall(r"^launcher\.(\w+)", listed, re.MULTILINE)), set(comes_by))
        options = ("--connect-timeout", "3")
        for site, victims in comes_by.items():
            for victim in victims:
                for action in ("kill", "throw"):
                    rule = f"launcher.{site}@rank={victim}:{action}"
                    with self.subTest(rule):
                        self.port = ports.free_port()
                        nodes = [
                            self.node(number, PROBE, "wait", "ignore", "child", options=options, ZEROTH_FAULTS=rule)
                            for number in (0, 1)
                        ]
                        codes = [node.code() for node in nodes]
                        said = nodes[0].err + nodes[1].err
                        if action == "kill":
                            self.assertEqual(codes[victim], 128 + signal.SIGKILL, said)
                        else:
                            self.assertIn(f"planted failure at launcher.{site}", said)
                            self.assertEqual(codes[victim], 70, said)
                        # The other one has lost it, has waited for it in vain, or has been told.
                        self.assertIn(codes[1 - victim], (69, 70, 76), said)
                        self.assertEqual(self.stage.left(), "")

    def test_ranks_end_with_the_head(self) -> None:
        head, other = self.node(0), self.node(1, PROBE, "wait", "ignore", "child")
        head.pids("READY", 2)
        head.kill()
        self.assertEqual(other.code(), 76)
        self.assertIn("[PEER_LOST] the head of the job has gone; the ranks of this node were ended", other.err)
        self.assertEqual(self.stage.left(), "")

    def test_a_node_that_is_told_to_stop_ends_the_job(self) -> None:
        head, other = self.node(0), self.node(1)
        head.pids("READY", 2)
        other.process.send_signal(signal.SIGTERM)
        self.assertEqual((head.code(), other.code()), (143, 143))
        self.assertIn("its agent was stopped by signal 15", head.err)

    def test_nodes_that_are_preempted_one_after_the_other_make_room_together(self) -> None:
        for first, second in ((0, 1), (1, 0)):
            with self.subTest(first=first):
                nodes = [self.node(number, PROBE, "room", "save=4") for number in range(2)]
                pids = nodes[0].pids("READY", 2)
                nodes[first].process.send_signal(signal.SIGTERM)
                nodes[0].wait_for("makes room", 1, stream="err")
                time.sleep(1.2)  # no repeat of the first request
                nodes[second].process.send_signal(signal.SIGTERM)
                if first == 1:
                    os.kill(pids[0], signal.SIGTERM)  # as the engine of rank 0 hears of it from rank 1
                self.assertEqual((nodes[0].code(), nodes[1].code()), (75, 75), nodes[0].err)
                self.assertIn("preempted: 2 of 2 ranks ended with exit code 75", nodes[1].err)

    def test_a_late_node_is_named_with_its_time(self) -> None:
        head = self.node(0, of=4, options=("--connect-timeout", "6"))
        other = self.node(2, of=4)
        self.assertEqual(head.code(), 69)
        self.assertIn("zeroth-run: waiting for nodes 1, 3 for 5 s (2 of 4 nodes are here)\n", head.err)
        self.assertIn("[LAUNCH] nodes 1, 3 did not come within 6 s; where: --rdzv", head.err)
        self.assertEqual(other.code(), 69)
        self.assertIn("nodes 1, 3 did not come within 6 s", other.err)

    def test_the_jobs_time_counts_while_nodes_are_awaited(self) -> None:
        began = time.monotonic()
        head = self.node(0, of=3, options=("--timeout", "1.5"))
        other = self.node(2, of=3)
        self.assertEqual((head.code(), other.code()), (76, 76))
        late_s = time.monotonic() - began - 1.5
        for run in (head, other):
            self.assert_waited(
                run,
                r"\[TIMEOUT\] the job took longer than 1\.5 s; nothing was started; where: --timeout; got: waited for node 1 for (\d+) s",  # noqa: E501
                range(1, 3),
                late_s,
            )

    def test_a_head_that_is_not_there_is_awaited_and_named(self) -> None:
        began = time.monotonic()
        other = self.node(1, options=("--connect-timeout", "6"))
        self.assertEqual(other.code(), 69)
        late_s = time.monotonic() - began - 6
        refused = r"for (\d+) s: Connection refused"
        self.assert_waited(other, rf"waiting for the head at 127\.0\.0\.1:\d+ {refused}", range(5, 6), late_s)
        self.assert_waited(other, rf"\[LAUNCH\] the head did not answer {refused}", range(6, 7), late_s)

    def test_a_port_that_says_nothing_takes_no_longer_than_the_time_that_is_given(self) -> None:
        with socket.create_server(("127.0.0.1", self.port)):
            began = time.monotonic()
            other = self.node(1, options=("--connect-timeout", "1.5"))
            self.assertEqual(other.code(), 69)
            lasted = time.monotonic() - began
        self.assertRegex(other.err, r"the head did not answer for \d s: whoever listens there says nothing;.*; hint: ")
        self.assertLess(lasted, 4.0)

    def test_a_secret_that_others_may_read_and_a_closed_output_are_warned_of(self) -> None:
        path = self.stage.folder / "secret"
        path.write_text(SECRET)
        for mode, warned in ((0o644, True), (0o600, False)):
            path.chmod(mode)
            options = ("--connect-timeout", "0.3", "--rdzv-secret-file", str(path))
            other = self.node(1, options=options)
            self.assertEqual(other.code(), 69)
            warning = f"warning: other users may read or change the secret: {path} has mode 644; hint: chmod 600"
            self.assertEqual(warning in other.err, warned, other.err)
        closed = self.stage.run(
            "-n", "1", "sh", "-c", "echo lost; echo kept >&2", prefix=("sh", "-c", '"$@" >&-', "sh")
        )
        self.assertEqual((closed.code(), closed.out), (0, ""), closed.err)
        self.assertEqual(closed.err.count("warning: standard output is closed: what the ranks write there is lost"), 1)
        self.assertIn("[0] kept\n", closed.err)

    def test_another_secret_is_a_stranger(self) -> None:
        head = self.node(0)
        wrong = self.node(1, secret="another secret of enough bytes")
        self.assertEqual(wrong.code(), 69)
        self.assertIn("the head closes the connection", wrong.err)
        self.assertIn("the secret must be the same on all nodes", wrong.err)
        right = self.node(1)
        for pid in head.pids("READY", 2).values():
            os.kill(pid, signal.SIGUSR1)
        self.assertEqual((head.code(), right.code()), (0, 0))
        self.assertIn("3 connections without the secret were refused", head.err)
        self.assertNotIn(SECRET, head.err + wrong.err)

    def test_a_head_that_does_not_know_the_secret_is_not_obeyed(self) -> None:
        with socket.create_server(("127.0.0.1", self.port)) as false_head:
            other = self.node(1)
            connection, _ = false_head.accept()
            with connection:
                challenge, proof, task = (
                    bytes([len(payload), 0, 0, 0, kind]) + payload
                    for kind, payload in ((14, b"n" * 16), (15, b"p" * 32), (2, b"t" * 100))
                )
                connection.sendall(b"ZEROTHAG\x01\0\0\0" + challenge + proof + task)
                self.assertEqual(other.code(), 69)
        self.assertIn("[LAUNCH] who listens at --rdzv does not know the secret", other.err)

    def test_what_a_node_may_not_say_ends_the_job_and_names_it(self) -> None:
        started = frame(FalseNode.STARTED, number(1) + number(77) + text(b"")[:4])
        ended = frame(FalseNode.RANK_END, number(1) + number(77) + number(0) * 3)
        for speech, said in (
            (frame(99, b""), "a message of no known kind"),
            (b"\xff\xff\xff\x7f\x05", "a message is too long"),
            (frame(FalseNode.TASK, b""), "an agent said what only the head of a job says"),
            (
                frame(FalseNode.STARTED, number(2) + number(77) * 2 + text(b"")[:4]),
                "an agent has started what it was not told to",
            ),
            (frame(FalseNode.STARTED, number(1 << 40)), "a number in a message is out of its limits"),
            (started + started, "an agent has started what it was not told to"),
            (started + frame(FalseNode.OUTPUT, number(0) + number(0) + b"x"), "a rank that it does not have"),
            (
                started + frame(FalseNode.OUTPUT, number(1) + number(2) + b"x"),
                "a number in a message is out of its limits",
            ),
            (started + frame(FalseNode.RANK_END, number(1)), "a message is cut off"),
            (started + ended + ended, "a rank has ended twice"),
        ):
            head = self.node(0)
            time.sleep(0.2)
            false = FalseNode(self.port)
            false.stream.sendall(speech)
            self.assertEqual(head.code(), 69, head.err)
            self.assertRegex(head.err, r"zeroth-run: host false/node1 \(rank 1\): \[LAUNCH\]")
            self.assertIn(said, head.err)
            false.stream.close()

    def test_a_node_that_sends_more_than_it_may_is_cut_off(self) -> None:
        read, write = os.pipe()  # nobody reads what the head writes
        head = subprocess.Popen(
            [
                launching.RUN,
                "-q",
                "-n",
                "1",
                "--nnodes",
                "2",
                "--node-rank",
                "0",
                "--rdzv",
                f"127.0.0.1:{self.port}",
                PROBE,
                "wait",
            ],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=subprocess.PIPE,
            env={**os.environ, "ZEROTH_RDZV_SECRET": SECRET},
        )
        os.close(write)
        time.sleep(0.3)
        false = FalseNode(self.port)
        false.say(FalseNode.STARTED, number(1) + number(77) + text(b"")[:4])
        sent = 0
        try:
            while sent < 64 << 20:
                false.say(FalseNode.OUTPUT, number(1) + number(0) + b"x" * 65_000)
                sent += 65_000
        except OSError:
            pass  # it is cut off
        false.stream.close()
        time.sleep(0.5)
        os.close(read)
        errors = head.communicate(timeout=10)[1].decode()
        self.assertEqual(head.returncode, 69, errors)
        self.assertIn("an agent sends more output than it may", errors)
        self.assertLess(sent, 16 << 20)

    def test_strangers_do_not_disturb(self) -> None:
        head = self.node(0)
        time.sleep(0.3)
        speeches = [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 3_000_000,
            b"ZEROTHAG\x01\0\0\0\xff\xff\xff\xff\x02",
            b"ZEROTHAG\x02\0\0\0",
            b"ZEROTHAG\x01\0\0\0\x10\0\0\0\x0e" + b"n" * 16 + b"\x20\0\0\0\x0f" + b"p" * 32,
            b"ZEROTH",
            b"",
        ]
        threads = [threading.Thread(target=self.stranger, args=(speech,)) for speech in speeches * 10]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with open(f"/proc/{head.process.pid}/status", encoding="ascii") as status:
            resident_kib = int(re.findall(r"VmRSS:\s+(\d+)", status.read())[0])
        self.assertLess(resident_kib, 100_000 if "ASAN_OPTIONS" in os.environ else 20_000)
        other = self.node(1)
        for pid in head.pids("READY", 2).values():
            os.kill(pid, signal.SIGUSR1)
        self.assertEqual((head.code(), other.code()), (0, 0), head.err)
        self.assertEqual(head.err.count("was refused"), 1, head.err)
        self.assertRegex(head.err, r"(6\d|70) connections without the secret were refused")

    def stranger(self, speech: bytes) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(speech)
                time.sleep(0.2)
        except OSError:
            pass  # it was refused while it spoke

    def test_a_silent_stranger_does_not_hold_the_door(self) -> None:
        head = self.node(0)
        time.sleep(0.3)
        silent = [socket.create_connection(("127.0.0.1", self.port), 5) for _ in range(200)]
        time.sleep(0.5)
        self.assertLess(len(os.listdir(f"/proc/{head.process.pid}/fd")), 64 * 2 + 16)
        other = self.node(1)
        for pid in head.pids("READY", 2).values():
            os.kill(pid, signal.SIGUSR1)
        self.assertEqual((head.code(), other.code()), (0, 0), head.err)
        for connection in silent:
            connection.close()

    def test_nodes_that_do_not_fit(self) -> None:
        head, other = self.node(0, of=3), self.node(1, of=2)
        self.assertEqual((head.code(), other.code()), (69, 69))
        for run in (head, other):
            self.assertRegex(
                run.err,
                r"a node expects another number of nodes; where: --rdzv; who: node 1 \(.*\); expected: --nnodes 3; got: --nnodes 2",  # noqa: E501
            )

    def test_a_second_node_of_the_same_number_is_refused(self) -> None:
        head = self.node(0, of=3)
        first = self.node(1, of=3)
        time.sleep(1)
        second = self.node(1, of=3)
        self.assertEqual(second.code(), 69)
        self.assertIn("this node is here already", second.err)
        last = self.node(2, of=3)
        for pid in head.pids("READY", 3).values():
            os.kill(pid, signal.SIGUSR1)
        self.assertEqual((head.code(), first.code(), last.code()), (0, 0, 0))

    def test_a_node_that_leaves_before_the_start_may_come_again(self) -> None:
        head = self.node(0, of=3)
        first = self.node(1, of=3)
        time.sleep(1)
        first.kill()
        head.wait_for("has left before the start", stream="err")
        nodes = [self.node(1, of=3), self.node(2, of=3)]
        for pid in head.pids("READY", 3).values():
            os.kill(pid, signal.SIGUSR1)
        self.assertEqual([run.code() for run in (head, *nodes)], [0, 0, 0])

    def test_a_port_that_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", self.port)):
            head = self.node(0)
            self.assertEqual(head.code(), 69)
        self.assertRegex(head.err, rf"\[LAUNCH\] cannot listen at 127\.0\.0\.1:{self.port}: Address already in use")

    def test_ctrl_c_while_waiting(self) -> None:
        head, other = self.node(0, of=3), self.node(1, of=3)
        time.sleep(1)
        head.process.send_signal(signal.SIGINT)
        self.assertEqual((head.code(), other.code()), (130, 130))

    def test_secrets_that_cannot_be_used(self) -> None:
        file = pathlib.Path(self.stage.folder, "secret")
        for text, said in (
            (None, "nodes need a secret"),
            ("short", "16 to 4096 bytes; got: 5 bytes"),
            ("x" * 5000, "got: 5000 bytes"),
        ):
            environment = {} if text is None else {"ZEROTH_RDZV_SECRET": text}
            run = self.stage.run(
                "-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "127.0.0.1:1", "true", **environment
            )
            self.assertEqual(run.code(), 64)
            self.assertIn(said, run.err)
        for path, code, said in (
            (str(file), 74, "No such file"),
            ("/dev/zero", 74, "not a regular file"),
            ("/", 74, "not a regular file"),
        ):
            run = self.node(0, options=("--rdzv-secret-file", path))
            self.assertEqual(run.code(), code)
            self.assertIn(said, run.err)
        file.write_text(SECRET + "\n")
        head, other = self.node(0, "true", options=("--rdzv-secret-file", str(file)), secret=""), self.node(1, "true")
        self.assertEqual((head.code(), other.code()), (0, 0), head.err + other.err)


if __name__ == "__main__":
    sys.exit(0 if unittest.main(verbosity=2, exit=False).result.wasSuccessful() else 1)
