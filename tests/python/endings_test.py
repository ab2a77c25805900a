"""How the ranks of a Python job end, and what holds between them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import forked
import job
import tier

if os.environ.get("ZEROTH_MPIRUN"):
    import mpi_test


class Processes(job.RankTest):
    def test_an_exception_on_one_rank_is_named_first(self) -> None:
        self.rank_1_is_named_first("trouble_rank.py", "exception")

    def test_an_exception_of_a_data_loaders_worker_is_told_with_its_cause(self) -> None:
        with job.Family(job.command(2, "trouble_rank.py", "loader")) as family:
            done = family.end(120, may_leave="/pymp-")  # a folder of multiprocessing
        self.assertRegex(
            done.stdout,
            r"rank 0 is told: \[ABORTED\] rank 1 stopped the job: \[USER\] OSError: Caught OSError in DataLoader "
            r"worker process 0: OSError: cannot read sample 5 \(\S*trouble_rank\.py:\d+ in __getitem__\); where: ",
            done.stderr,
        )

    def test_an_exception_of_a_signal_handler_inside_a_call_is_told(self) -> None:
        done = job.run(2, "trouble_rank.py", "handler")
        self.assertRegex(
            done.stdout,
            r"rank 0 is told: \[ABORTED\] rank 1 stopped the job: .*there: RuntimeError: a worker is gone",
            done.stderr,
        )

    def test_ranks_that_disagree_are_told_on_all_ranks(self) -> None:
        done = job.run(2, "trouble_rank.py", "disagree")
        self.assertEqual(done.returncode, 76, done.stderr)
        for rank in (0, 1):
            self.assertRegex(done.stdout, rf"rank {rank} is told: \[MISMATCH\]")

    def test_a_rank_that_ends_before_it_builds_an_engine_is_named_at_once(self) -> None:
        done = job.run(2, "trouble_rank.py", "never", "memory", limit_s=60)
        self.assertEqual(done.returncode, 76, done.stderr)
        told = re.search(
            r"rank 0 is told after (\d+\.\d) s: \[PEER_LOST\] rank 1 \(pid \d+\) exited with code 0 before the ranks "
            r"met; where: comm\.shm\.rendezvous; .*hint: every rank of the job has to build the engine",
            done.stdout,
        )
        assert told is not None, done.stdout + done.stderr
        self.assertLess(float(told[1]), 10.0)
        done = job.run(2, "trouble_rank.py", "never", "group", limit_s=60)
        self.assertEqual(done.returncode, 76, done.stderr)
        self.assertRegex(
            done.stderr, r"ZEROTH ERROR \[PEER_LOST\] rank 1 \(pid \d+\) exited with code 0 before the ranks met"
        )

    def test_the_exit_code_is_that_of_the_error_where_torch_has_set_a_hook_after_ours(self) -> None:
        done = job.run(2, "trouble_rank.py", "torch_inside")
        self.assertEqual(done.returncode, 78, done.stderr)
        self.assertRegex(done.stderr, r"\[rank1\]: zeroth\.ConfigError: \[CONFIG\]")
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"rank 1 \(pid \d+\) exited with code 78: ")

    def test_messages_count_the_steps_of_the_training(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = job.run(2, "trouble_rank.py", "resumed", folder)
        self.assertEqual(done.returncode, 76, done.stderr)
        self.assertRegex(
            done.stdout,
            r"rank 0 is told: \[PEER_LOST\] rank 1 .*it ended after 5 steps, while rank 0 is in .* of step 6: .*"
            r"engine\.steps 5, error\.step 6",
        )

    def test_ranks_in_different_calls_hear_the_names_and_the_lines_of_all(self) -> None:
        done = job.run(2, "trouble_rank.py", "barriers", "names")
        line = r"at \S*trouble_rank\.py:\d+ in barriers"
        for rank in (0, 1):
            for other in (0, 1):
                self.assertRegex(
                    done.stdout,
                    rf"rank {rank} is told: \[MISMATCH\] ranks make different calls; .*"
                    rf'barrier#\d+ "name of {other}" \(rank {other} {line}\)',
                    done.stderr,
                )
        self.assertNotRegex(done.stdout + done.stderr, "unit -1|label|, tag ")
        done = job.run(2, "trouble_rank.py", "barriers", "step")
        for rank in (0, 1):
            told = rf"rank {rank} is told: \[MISMATCH\] ranks come to different calls of the engine; .*"
            self.assertRegex(done.stdout, told + rf'barrier\(\) "name of 0" on rank 0 {line}', done.stderr)
            self.assertRegex(done.stdout, told + r"step\(\) on rank 1 at \S*trouble_rank\.py:\d+ in train", done.stderr)

    def test_buffers_are_rank_zeros_in_every_training_forward_as_in_torch(self) -> None:
        self.run_well(3, "buffers_rank.py")

    def test_backward_does_not_take_the_gil(self) -> None:
        # Rank 1 goes on only while rank 0 does, whose GIL is taken for two seconds. A hook in Python has to wait for
        # it: so the test would see one. Should the thread take the GIL before backward has begun, the run says nothing:
        # hence three of them.
        def seconds(hook: str) -> float:
            done = job.run(2, "trouble_rank.py", "gil", hook)
            taken = re.search(r"backward took (\d+\.\d+) s", done.stdout)
            assert taken is not None, done.stdout + done.stderr
            return float(taken[1])

        self.assertTrue(any(seconds("none") < 1.5 for _ in range(3)))
        self.assertGreater(seconds("python"), 1.5)

    def test_a_rank_that_gives_up_tells_the_others_why(self) -> None:
        done = job.run(3, "trouble_rank.py", "give_up")
        for rank in range(3):
            self.assertRegex(
                done.stdout, rf"rank {rank} is told: \[ABORTED\].*the data has run out.*rank 1/3", done.stderr
            )

    def test_sigterm_on_one_rank_is_agreed_on_by_all(self) -> None:
        done = job.run(3, "trouble_rank.py", "preempt")
        self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
        told = re.findall(r"rank (\d) makes room after step (\d+)", done.stdout)
        self.assertEqual(sorted(told), [(str(rank), "6") for rank in range(3)], done.stdout)

    def test_sigterm_to_the_launcher_gives_rank_0_the_time_to_save(self) -> None:
        with job.Family(job.command(3, "trouble_rank.py", "make_room")) as launcher:
            launcher.wait_for("trains", 3)
            launcher.process.send_signal(signal.SIGTERM)
            done = launcher.end(60)
            self.assertEqual(launcher.left.text(), "")
        self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
        told = re.findall(r"rank (\d) makes room after step (\d+)", done.stdout)
        self.assertEqual(sorted(rank for rank, _ in told), ["0", "1", "2"], done.stdout)
        self.assertEqual(len({step for _, step in told}), 1, done.stdout)
        self.assertIn("zeroth-run: preempted: 3 of 3 ranks", done.stderr)

    def test_ctrl_c_lets_the_ranks_end_their_step_and_save(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            job.Family(job.command(2, "trouble_rank.py", "save_at_ctrl_c", folder)) as launcher,
        ):
            launcher.wait_for("trains", 2)
            launcher.process.send_signal(signal.SIGINT)
            done = launcher.end(60)
            self.assertEqual(launcher.left.text(), "")
        self.assertEqual(done.returncode, 75, done.stdout + done.stderr)
        told = re.findall(r"rank (\d) saved step (\d+) as step-0*(\d+)", done.stdout)
        self.assertEqual(sorted(rank for rank, _, _ in told), ["0", "1"], done.stdout)
        self.assertEqual(len({number for _, *numbers in told for number in numbers}), 1, done.stdout)

    @tier.long
    def test_a_slow_rank_is_named_within_twenty_steps(self) -> None:
        with job.Family(job.command(3, "trouble_rank.py", "slow")) as family:
            done = family.end(120)
        self.assertEqual(done.returncode, 0, done.stderr)
        before, after = done.stderr.split("slow from here")
        self.assertNotIn("is slow", before)
        self.assertRegex(
            after,
            r"warning: rank 1 is slow: it computes [12]\.\d\d times as long as the others, over 16 steps, most of it between steps \(\d\d\.\d ms a step more\)",  # noqa: E501
        )

    @tier.long
    def test_a_killed_rank_is_named(self) -> None:
        done = job.run(2, "trouble_rank.py", "kill")
        self.assertEqual(done.returncode, 128 + signal.SIGKILL)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    def test_ctrl_c_ends_a_job_without_a_flood(self) -> None:
        with job.Family(job.command(3, "trouble_rank.py", "forever", merge=True)) as launcher:
            launcher.wait_for("trains", 1)
            launcher.process.send_signal(signal.SIGINT)
            done = launcher.end(20)
        self.assertEqual(done.returncode, 128 + signal.SIGINT, done.stderr)
        lines = done.stderr.strip().splitlines()
        self.assertEqual(lines[-1], "zeroth-run: stopped by signal 2 (SIGINT); 3 ranks were ended.")
        self.assertLessEqual(
            len(re.findall("Traceback", done.stderr)), 3, done.stderr
        )  # one a rank, where they are at different places
        self.assertNotRegex(done.stderr, "Error|lost sys.stderr|Exception ignored|During handling")
        self.assertLess(len(lines), 100, done.stderr)

    def test_a_bare_process_is_a_world_of_one(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", "import zeroth; print(zeroth.World.from_environment())"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        self.assertEqual(done.stdout.strip(), "zeroth.World(rank=0, size=1, backend='self')")
        self.assertLess(time.monotonic() - begin, 120)


class ExitCodes(unittest.TestCase):
    """Of scripts that an exception leaves, alone; with others: waits_test.py."""

    SETUP = """
import sys, torch, zeroth
from torch import nn

class Sub(torch.Tensor):
    pass

def engine(config=None, model=None, **options):
    return zeroth.Engine(model or nn.Linear(2, 2), config or {}, log_level="off", **options)

def train(engine, factor=1.0):
    engine.backward((engine(torch.ones(1, 2)) * factor).sum())
    return engine.step()
"""
    ENDINGS: tuple[tuple[str, int, str], ...] = (
        ("CONFIG", 78, 'engine({"zero_optimization": {"stge": 3}})'),
        ("CONFIG", 78, 'zeroth.Config.from_json("{", "a text")'),
        ("USAGE", 64, "engine().step()"),
        ("MODEL", 65, "engine(units=[nn.Linear(2, 2)])"),
        ("NONFINITE", 65, 'it = engine({"zeroth": {"max_nonfinite_steps": 2}})\nwhile True: train(it, float("nan"))'),
        ("OUT_OF_MEMORY", 71, 'engine({"zeroth": {"memory_limit_bytes": 1}})'),
        ("IO", 74, 'it = engine()\ntrain(it)\nit.export_safetensors("/no/such/folder/x")'),
        ("ENVIRONMENT", 77, 'import os\nos.environ["RANK"] = "0"\nzeroth.World.from_environment()'),
        ("INTERNAL", 70, 'zeroth.make_error("NO_SUCH", "code")'),
        ("TIMEOUT", 76, 'raise zeroth.make_error("TIMEOUT", "no answer")'),
        ("", 1, 'engine()\nraise ValueError("a mistake of the user\'s")'),
        ("", 1, 'raise zeroth.Error("one that nobody has made with make_error()")'),
        ("", 3, "engine()\nsys.exit(3)"),
        ("", -signal.SIGINT, "engine()\nraise KeyboardInterrupt"),
        ("", 0, "it = engine()\ntry:\n    it.step()\nexcept zeroth.Error:\n    pass"),
    )

    def end(self, program: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [*forked.python(), "-c", self.SETUP + program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def test_a_script_ends_with_the_code_of_the_error_that_leaves_it(self) -> None:
        for code, exit_code, program in self.ENDINGS:
            with self.subTest(program=program):
                done = self.end(program)
                self.assertEqual(done.returncode, exit_code, done.stderr)
                last = (done.stderr.splitlines() or [""])[-1]
                self.assertEqual(done.stderr.count("Traceback"), exit_code not in (0, 3), done.stderr)
                self.assertRegex(last, rf"^zeroth\.(Config)?Error: \[{code}\] " if code else "^")

    def test_the_hook_that_was_there_is_called_and_may_be_called(self) -> None:
        fails = "\nengine().step()"
        own = "def hook(*_): print('the hook of', __name__, file=sys.stderr)\n"
        around = own + "before = sys.excepthook\nsys.excepthook = lambda *error: (before(*error), hook())"
        called = self.end(around + fails)
        self.assertEqual(called.returncode, 64, called.stderr)
        self.assertRegex(called.stderr, r"(?s)^Traceback.*\[USAGE\].*\nthe hook of __main__\n$")
        # One that comes after the last engine has the last word, on the exit code, too.
        called = self.end("it = engine()\n" + around + "\nit.step()")
        self.assertEqual(called.returncode, 1, called.stderr)
        self.assertRegex(called.stderr, r"(?s)^Traceback.*\[USAGE\].*\nthe hook of __main__\n$")
        first = subprocess.run(
            [*forked.python(), "-c", "import sys\n" + own + "sys.excepthook = hook\n" + self.SETUP + fails],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual((first.returncode, first.stderr), (64, "the hook of __main__\n"))

    def test_a_console_goes_on(self) -> None:
        cell = 'import code\nconsole = code.InteractiveInterpreter({"engine": engine})\nconsole.runcode("engine().step()")\nprint("goes on")'  # noqa: E501
        done = self.end(cell)
        self.assertEqual((done.returncode, done.stdout), (0, "goes on\n"), done.stderr)
        self.assertIn("zeroth.Error: [USAGE]", done.stderr)
        typed = subprocess.run(
            [sys.executable, "-i"],
            input="import zeroth\nraise zeroth.make_error('USAGE', 'x')\nprint('goes on')\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertIn("goes on\n", typed.stdout, typed.stderr)


PLACES = {
    "construction": "__init__",
    "forward": "__call__",
    "backward": "backward",
    "step": "_step",
    "export": "export_safetensors",
    "close": "close",
}
"""calls that wait, and functions of the engine"""


class Interrupts(job.RankTest):
    """Rank 1 comes late to each call; rank 0, which waits for it there, gets SIGINT and calls again."""

    arguments: tuple[str, ...] = ()
    done: subprocess.CompletedProcess[str]

    @classmethod
    def setUpClass(cls) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cls.done = job.run(2, "interrupt_rank.py", folder, *cls.arguments, limit_s=120)

    def told(self, where: str, who: str) -> str:
        found = re.search(rf"^\[[01]\] {where}: {who}(.*)$", self.done.stdout, re.MULTILINE)
        assert found is not None, self.done.stdout + self.done.stderr
        return found[1]

    def test_ctrl_c_ends_each_wait_within_half_a_second(self) -> None:
        self.assertEqual(self.done.returncode, 0, self.done.stdout + self.done.stderr)
        for where, place in PLACES.items():
            with self.subTest(where=where):
                seconds, function = self.told(where, "KeyboardInterrupt after ").split(" s in ")
                self.assertLessEqual(float(seconds), 0.5)
                self.assertEqual(function, place)


class InMemory(Interrupts):
    def test_construction_and_backward_go_on(self) -> None:
        skipped = (
            "goes on: zeroth.StepResult(step=1, committed=False, reason='backward failed on rank 0', "
            "cause='failed backward')"
        )
        for where, first in (("construction", "goes on: None"), ("backward", skipped)):
            for rank in (0, 1):
                with self.subTest(where=where, rank=rank):
                    self.assertEqual(self.told(where, f"rank {rank} (?!then)"), first)
                    self.assertRegex(
                        self.told(where, f"rank {rank} then "),
                        r"^goes on: zeroth\.StepResult\(step=\d+, committed=True",
                    )

    def test_other_calls_go_on_or_say_at_once_why_not(self) -> None:
        for where in ("forward", "step", "export", "close"):
            with self.subTest(where=where):
                self.assertRegex(self.told(where, "rank 0 "), r"^goes on|^is told: .*interrupt.*; hint: ")
                self.assertRegex(self.told(where, "rank 1 "), r"^goes on|^is told: \[(ABORTED|PEER_LOST)\] .*rank 0")


@tier.long
class OverAGroup(Interrupts):
    """Every call is one of all ranks there: what was cut in the middle stays broken, and the other rank hears why."""

    arguments = ("group",)

    def test_the_world_stays_broken(self) -> None:
        for where in PLACES:
            with self.subTest(where=where):
                self.assertRegex(
                    self.told(where, "rank 0 "), r"^is told nothing: KeyboardInterrupt|^is told: .*interrupt.*; hint: "
                )
                why = r"\[ABORTED\] rank 0 stopped the job: .*interrupt"
                if (
                    where == "construction"
                ):  # an engine that is not there yet tells nobody: the group hears that its rank went
                    why += r"|\[PEER_LOST\] torch's group lost rank 0"
                self.assertRegex(self.told(where, "rank 1 "), rf"^is told: (?:{why})")


@unittest.skipUnless(os.environ.get("ZEROTH_MPIRUN"), "needs mpirun")
class OverMpi(unittest.TestCase):
    """As over a group. But who is interrupted in the construction has a thread in MPI, and can only end."""

    @tier.both
    def test_ctrl_c_ends_each_wait_within_half_a_second_and_the_other_rank_hears_why(self) -> None:
        every = [place for place in PLACES.items() if place[0] != "construction"]
        for where, place in tier.rows(every, [("step", "_step")]):
            with self.subTest(where=where), tempfile.TemporaryDirectory() as folder:
                program = [*forked.python(), str(job.HERE / "interrupt_rank.py"), folder, "mpi", where]
                with job.Family(
                    [*mpi_test.MPIRUN, "--enable-recovery", "-n", "2", *program],
                    mpi_test.variables(ZEROTH_BACKEND="mpi"),
                ) as family:
                    done = family.end(120)
                found = re.search(rf"{where}: KeyboardInterrupt after (\S+) s in (\w+)", done.stdout)
                assert found is not None, done.stdout + done.stderr
                self.assertLessEqual(float(found[1]), 0.5)
                self.assertEqual(found[2], place)
                self.assertRegex(
                    done.stdout, rf"{where}: rank 1 is told: \[ABORTED\] rank 0 stopped the job: .*interrupt"
                )

    def test_ctrl_c_ends_a_rank_while_mpi_opens_its_world(self) -> None:
        program = [*forked.python(), str(job.HERE / "interrupt_rank.py"), "no folder", "mpi", "opening"]
        with job.Family([*mpi_test.MPIRUN, "-n", "2", *program], mpi_test.variables(ZEROTH_BACKEND="mpi")) as family:
            done = family.end(60)
            ended = time.time()
        found = re.search(r"opening: KeyboardInterrupt after (\S+) s in (\w+)", done.stdout)
        assert found is not None, done.stdout + done.stderr
        self.assertLessEqual(float(found[1]), 0.5)
        said = re.search(r"opening: rank 0 ends at (\S+)", done.stdout)
        assert said is not None, done.stdout + done.stderr
        self.assertLess(ended - float(said[1]), 10, "mpirun has seen it end, and has ended the other one")
        self.assertNotEqual(done.returncode, 0)
        self.assertNotRegex(done.stderr, r"signal 11|Segmentation")


del Interrupts  # only what is made of it has tests to run


if __name__ == "__main__":
    tier.main()
