"""One stage of a pipeline fails. The other ranks, and the last line of the launcher, name the stage, the action and the
micro-batch. All jobs run side by side; most of them wait for nothing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import unittest

import forked
import job
import tier

SEEN_OF_OTHERS = 76
FORWARD = r"action 1F1 of step 3 \(stage 1 of {stages}: the forward of chunk 1, micro-batch 1\)"
BACKWARD = r"action 1B1 of step 3 \(stage 1 of {stages}: the backward of chunk 1, micro-batch 1\)"
AWAITED = (
    r"the (gradient of the output of chunk 0, micro-batch (?P<back>\d), from stage 1 \(1SEND_B(?P=back)\)"
    r"|input of chunk 2, micro-batch (?P<on>\d), from stage 1 \(1SEND_F(?P=on)\))"
)
"""of stage 1, by its neighbours"""
SEEN = r"(, last seen in action (1\w+|STEP) of step \d \(stage 1 of \d: [^)]*\)( \d\.\d s before)?)?"
SENDING = (
    r"action 1SEND_B1 of step 3 \(stage 1 of {stages}: sends the gradient of the input of chunk 1, micro-batch 1\)"  # noqa: E501
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Stage 1 misbehaves in the third step, at micro-batch 1."""

    how: str
    transport: str = "shm"
    ranks: int = 2
    faults: str = ""
    """ZEROTH_FAULTS"""

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != 1]

    def run(self) -> subprocess.CompletedProcess[str]:
        command = job.command(self.ranks, "pipe_faults_rank.py", self.how, self.transport)
        environment = {**os.environ, "ZEROTH_FAULTS": self.faults} if self.faults else dict(os.environ)
        with job.Family(command, environment, beside=True) as family:
            return family.end(180)


EVERY: dict[str, list[Case]] = {
    "killed": [
        Case("kill_forward", ranks=3),
        Case("kill_backward"),
        Case("kill_forward", "gloo"),
        Case("kill_backward", "gloo", ranks=3),
    ],
    # The sends of two steps, and of the third one that of micro-batch 0: the head of each, and its values.
    "killed in a send": [Case("kill", faults="shm.send.start@rank=1,hit=21:kill")],
    "stopped": [Case("stop_forward", ranks=3), Case("stop_backward", "gloo")],
    "hangs": [Case("sleep_backward", ranks=3), Case("sleep_forward", "gloo")],
    "raises": [
        Case("mistake_forward", "gloo", ranks=3),
        Case("mistake_backward"),
        Case("mistake_forward"),
        Case("mistake_backward", "gloo"),
    ],
    "goes on": [Case("again_forward"), Case("again_backward", "gloo", ranks=3)],
    "fewer": [Case("fewer"), Case("fewer", "gloo", ranks=3)],
    "evaluates": [Case("evaluate", ranks=3), Case("evaluate", "gloo")],
    "evaluates more": [Case("count"), Case("count", "gloo", ranks=3)],
    "leaves": [Case("leave", "gloo"), Case("leave", ranks=3)],
    "differ": [Case("differ"), Case("differ", "gloo")],
}
FEW = {of: every[:1] for of, every in EVERY.items()} | {
    "killed": [Case("kill_forward", ranks=3), Case("kill_backward", "gloo", ranks=3)],
    "raises": EVERY["raises"][:2],
}
"""in `make test`"""


def cases(of: str) -> list[Case]:
    return tier.rows(EVERY[of], FEW[of])


def action_of(case: Case, pattern: str = "") -> str:
    if not pattern:
        pattern = BACKWARD if case.how.endswith("backward") else FORWARD
    return pattern.format(stages=case.ranks)


class Faults(unittest.TestCase):
    jobs: dict[Case, concurrent.futures.Future[subprocess.CompletedProcess[str]]]

    @classmethod
    def setUpClass(cls) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(4)
        cls.addClassCleanup(pool.shutdown, cancel_futures=True)
        forked.python()  # started by this thread
        cls.jobs = {case: pool.submit(case.run) for case in dict.fromkeys(case for of in EVERY for case in cases(of))}

    def ended(self, case: Case, code: int) -> subprocess.CompletedProcess[str]:
        done = self.jobs[case].result()
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def told(self, done: subprocess.CompletedProcess[str], rank: int, limit_s: float) -> str:
        """What a rank is told, in time, with its own step."""
        found = re.search(rf"^\[{rank}\] rank {rank} is told after (\d+\.\d) s: (.*)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout + done.stderr
        self.assertLess(float(found[1]), limit_s)
        return found[2]

    def torch_was_first(self, case: Case, text: str) -> bool:
        """Whether a slow machine heard of the end of a rank's connection before it heard why: the text has what is
        awaited from the stage."""
        if case.transport != "gloo" or "torch's group" not in text:
            return False
        self.assertRegex(text, r"\[PEER_LOST\] torch's group lost rank 1; .*" + AWAITED)
        return True

    def last_line(self, done: subprocess.CompletedProcess[str]) -> str:
        return done.stderr.strip().splitlines()[-1]

    @tier.both
    def test_a_stage_that_is_killed_is_named_with_its_action(self) -> None:
        for case in cases("killed"):
            with self.subTest(case):
                done = self.ended(case, 137)
                # Over messages it is the action of the last beat, which any before the fault can be, or none.
                place = f", in {action_of(case)}" if case.transport == "shm" else SEEN
                for rank in case.others:
                    text = self.told(done, rank, 5.0)
                    if self.torch_was_first(case, text):
                        continue
                    killed = r"^\[PEER_LOST\] rank 1 \(pid .*\) was killed by SIGKILL \(signal 9\)"
                    self.assertRegex(text, rf"{killed}{place}; where: ")
                    self.assertRegex(text, r"who: rank \d/\d, step 3 \(\d\w+\d\)")
                ended = "the other rank was ended" if case.ranks == 2 else "the other 2 ranks were ended"
                self.assertRegex(
                    self.last_line(done),
                    rf"^zeroth-run: rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\){place}; {ended}\.$",
                )

    @tier.both
    def test_whoever_waits_for_a_lost_stage_says_for_which_values(self) -> None:
        for case in cases("killed"):
            with self.subTest(case):
                done = self.ended(case, 137)
                told = {rank: self.told(done, rank, 5.0) for rank in case.others}
                waits = " ".join(told.values())
                self.assertRegex(waits, AWAITED)

    def test_a_stage_that_is_killed_as_it_sends_is_named_with_its_action(self) -> None:
        for case in cases("killed in a send"):
            done = self.ended(case, 137)
            self.assertRegex(self.told(done, 0, 5.0), f", in {action_of(case, SENDING)}; ")
            self.assertRegex(self.last_line(done), rf"\(SIGKILL\), in {action_of(case, SENDING)}; ")

    @tier.both
    def test_a_stage_that_is_stopped_is_named_with_its_action(self) -> None:
        for case in cases("stopped"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                by_memory = rf"\[PEER_LOST\] rank 1\b.* is frozen: no heartbeat.*, in {action_of(case)}; .*" + AWAITED
                by_beats = rf"\[PEER_LOST\] rank 1\b.* has given no sign of life[^;]*{SEEN}; .*{AWAITED}"
                for text in [*(self.told(done, rank, 15.0) for rank in case.others), self.last_line(done)]:
                    self.assertRegex(text, by_memory if case.transport == "shm" else by_beats)

    @tier.both
    def test_a_stage_that_hangs_is_named_with_its_action_and_line(self) -> None:
        for case in cases("hangs"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                for text in [*(self.told(done, rank, 15.0) for rank in case.others), self.last_line(done)]:
                    self.assertRegex(
                        text,
                        rf"\[TIMEOUT\] no answer within 2\.0 s: rank 1 \(pid \d+ on .*\) is in {action_of(case)}, "
                        r"in unit \S+, at .*pipe_faults_rank\.py:\d+ in sleep",
                    )

    @tier.both
    def test_an_exception_of_the_model_is_named_with_its_action_and_stays_what_it_is(self) -> None:
        for case in cases("raises"):
            with self.subTest(case):
                done = self.ended(case, 1)
                why = (
                    r"\[USER\] ValueError: no such token: 50257; where: .*pipe_faults_rank\.py:\d+ in mistake; which: "
                )
                for rank in case.others:
                    self.assertRegex(
                        self.told(done, rank, 5.0),
                        rf"^\[ABORTED\] rank 1 stopped the job: {why}{action_of(case)}; who: rank {rank}/\d, step 3 \(",
                    )
                self.assertRegex(
                    self.last_line(done),
                    rf"^zeroth-run: rank 1 \(pid \d+\) exited with code 1: {why}{action_of(case)}; the other",
                )
                lines = [line[4:] for line in done.stderr.splitlines() if line.startswith("[1] ")]
                own = "\n".join(line.removeprefix("[rank1]: ") for line in lines)  # of torch, where it has a group
                self.assertRegex(
                    own,
                    r"in mistake\n *raise ValueError\(\"no such token: 50257\"\)\n"
                    rf"ValueError: no such token: 50257\nraised in {action_of(case)}$",
                )

    @tier.both
    def test_after_an_error_in_an_action_no_stage_takes_another_step(self) -> None:
        for case in cases("goes on"):
            with self.subTest(case):
                done = self.ended(case, 64)
                refusal = r"\[USAGE\] an earlier step of the pipeline was left before its end; "
                place = (
                    rf"who: rank {{0}}/{case.ranks}, stage {{0}} of {case.ranks}; which: {{1}}; "
                    r".*hint: make another engine, and go on from"
                )
                self.assertRegex(self.told(done, 1, 5.0), refusal + ".*" + place.format(1, action_of(case)))
                for rank in case.others:
                    heard = re.search(rf"^\[{rank}\] rank {rank} is told first: (.*)$", done.stdout, re.MULTILINE)
                    assert heard is not None, done.stdout + done.stderr
                    why = r"\[USER\] ValueError: no such token: 50257; where: .* in mistake"  # although it is caught
                    self.assertRegex(
                        heard[1], rf"^\[ABORTED\] rank 1 stopped the job: {why}; which: {action_of(case)};"
                    )
                    own = rf"action {rank}\w+ of step 3 \(stage {rank} of {case.ranks}: .*\)"
                    self.assertRegex(self.told(done, rank, 5.0), refusal + ".*" + place.format(rank, own))

    @tier.both
    def test_a_stage_with_too_few_micro_batches_is_named_with_the_one_that_is_missing(self) -> None:
        for case in cases("fewer"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                for text in [*(self.told(done, rank, 5.0) for rank in range(case.ranks)), self.last_line(done)]:
                    self.assertRegex(
                        text,
                        r"\[MISMATCH\] there are too few micro-batches for a step; .*"
                        rf"who: rank 1/{case.ranks}, stage 1 of {case.ranks}; which: micro-batch 2, of action 1F2; "
                        r"expected: 4 micro-batches; got: 2;",
                    )

    @tier.both
    def test_a_stage_that_evaluates_while_others_train_is_named(self) -> None:
        for case in cases("evaluates"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                evaluation, training = "an evaluation of 4 micro-batches", "a training step of 4 micro-batches"
                for text in [*(self.told(done, rank, 5.0) for rank in range(case.ranks)), self.last_line(done)]:
                    self.assertRegex(
                        text,
                        r"\[MISMATCH\] stages do not run the same; .*which: the (input|gradient of the output) of "
                        rf"chunk \d, micro-batch 0, from stage \d .*expected: ({evaluation}; got: {training}"
                        rf"|{training}; got: {evaluation});",
                    )

    @tier.both
    def test_a_stage_that_evaluates_more_micro_batches_is_named(self) -> None:
        for case in cases("evaluates more"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                for text in [*(self.told(done, rank, 5.0) for rank in range(case.ranks)), self.last_line(done)]:
                    self.assertRegex(
                        text,
                        r"\[MISMATCH\] stages do not run the same; .*which: the input of chunk (1, micro-batch 0, from "
                        r"stage 0 \(0SEND_F0\) to stage 1; expected: an evaluation of 6 micro-batches; got: an "
                        r"evaluation of 4 micro-batches|2, micro-batch 0, from stage 1 \(1SEND_F0\) to stage 2; "
                        r"expected: an evaluation of 4 micro-batches; got: an evaluation of 6 micro-batches);",
                    )

    @tier.both
    def test_a_stage_that_leaves_is_named(self) -> None:
        for case in cases("leaves"):
            with self.subTest(case):
                done = self.ended(case, SEEN_OF_OTHERS)
                for text in [*(self.told(done, rank, 5.0) for rank in case.others), self.last_line(done)]:
                    if self.torch_was_first(case, text):
                        continue
                    self.assertRegex(
                        text,
                        r"\[PEER_LOST\] rank 1 \(pid .*\) left early: it ended after 2 steps, while rank "
                        # Whichever stage is the first to say that it waits.
                        rf"(0 is in action 0RECV_B0 of step 3 \(stage 0 of {case.ranks}: receives the gradient of the "
                        rf"output of chunk 0, micro-batch 0\)|2 is in action \S+ of step 3 \(stage 2 of "
                        rf"{case.ranks}: [^)]*\)): unequal batch counts\?",
                    )

    @tier.both
    def test_pipelines_that_ranks_make_differently_are_refused_before_they_run(self) -> None:
        expected = {
            "split": ("rank 1/2, stage 1 of 2", "the split", "chunk 0: 0 to 1; chunk 1: 2 to 5", "chunk 0: 0; chunk 1"),
            "schedule": ("rank 1/2, stage 1 of 2", "the schedule", "1f1b, 4 micro-batches", "gpipe, 4 micro-batches"),
            "steps": ("rank 1/2, stage 1 of 2", "the schedule", "1f1b, 4 micro-batches", "1f1b, 5 micro-batches"),
            "layers": ("rank 1/2, stage 1 of 2", "the layers", "0, 1, 2, 3, 4, 5 ", "0, 1, 2, 3, 4, 5, 6 "),
            "program": (r"stage 1 of 2 \(world/mesh\d+\)", "the schedule", "1f1b", "gpipe"),
        }
        for case in cases("differ"):
            with self.subTest(case):
                done = self.ended(case, 0)
                self.assertEqual(done.stdout.count("has trained"), 2)
                for what, (who, which, usual, odd) in expected.items():
                    for rank in range(2):
                        self.assertRegex(
                            done.stdout,
                            rf"rank {rank} is told of {what}: \[MISMATCH\] .*who: {who}; which: {which}; "
                            rf"expected: {usual}.*; got: {odd}.*; hint: give (all ranks|every stage) the same",
                        )


if __name__ == "__main__":
    tier.main()
