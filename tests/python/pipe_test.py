"""Models in the stages of a pipeline: every schedule and ZeRO stage against one process; what an engine of a pipeline
can do beside train_batch(); the trainer examples/gpt and examples/pipeline."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
from typing import Any

import forked
import job
import tier
from pipe_errors import Errors
from pipe_rows import AXES, COVER, HEADS, SCHEDULES, WAYS

forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "gpt2")),
)
__all__ = ["Errors"]
EXAMPLES = job.HERE.parents[1] / "examples"
TRAIN = EXAMPLES / "gpt/train.py"
EXAMPLE = EXAMPLES / "pipeline/train.py"


class Schedules(job.RankTest):
    """pipe_rank.py: losses, norms and weights of one process."""

    @tier.both
    def test_each_two_of_schedule_zero_stage_axis_stages_and_micro_batches(self) -> None:
        for ranks in tier.rows((2, 3, 4, 6, 8), (2, 3, 4)):
            self.run_well(ranks, "pipe_rank.py", f"cover {ranks}")

    def test_the_covering_set_has_each_two(self) -> None:
        factors = {
            "schedule": (lambda row: row.schedule, SCHEDULES),
            "ZeRO stage": (lambda row: row.stage, range(4)),
            "stages": (lambda row: row.pp, (2, 3, 4)),
            "axis": (lambda row: next((one for one in AXES[1:] if getattr(row, one) > 1), "none"), AXES),
            "micro-batches": (lambda row: row.micro, (1, 2, 3, 5)),
        }
        for (one, (of, values)), (other, (of_other, others)) in itertools.combinations(factors.items(), 2):
            found = {(of(row), of_other(row)) for row in COVER}
            self.assertEqual(set(itertools.product(values, others)) - found, set(), f"{one} and {other}")
        again = [row for row in COVER if row.again]
        for name in ("schedule", "ZeRO stage", "axis"):
            of, values = factors[name]
            self.assertEqual({of(row) for row in again}, set(values), f"{name} of what is computed again")

    def test_stages_of_zero_have_the_same_bits(self) -> None:
        self.run_well(4, "pipe_rank.py", "few 4")

    @tier.long
    def test_two_to_four_stages_and_half_precision(self) -> None:
        self.run_well(2, "pipe_rank.py", "two", "few", "few 2", "half")
        self.run_well(3, "pipe_rank.py", "three")
        self.run_well(4, "pipe_rank.py", "four")

    @tier.long
    def test_states_and_parameters_in_files_under_every_schedule(self) -> None:
        for ranks in (2, 4):
            self.run_well(ranks, "pipe_rank.py", "files")

    @tier.long
    def test_every_axis_of_the_mesh(self) -> None:
        self.run_well(4, "pipe_rank.py", "tp", "sp")
        self.run_well(8, "pipe_rank.py", "eight")
        self.run_well(16, "pipe_rank.py", "sixteen")  # all four

    @tier.long
    def test_every_schedule_on_two_to_four_stages(self) -> None:
        for ranks in (2, 3, 4):
            self.run_well(ranks, "pipe_rank.py", f"schedules {ranks}")

    @tier.long
    def test_every_schedule_with_one_to_eight_micro_batches(self) -> None:
        for ranks in (2, 3, 4):
            self.run_well(ranks, "pipe_rank.py", f"grid {ranks}", limit_s=1800)


class Heads(job.RankTest):
    """pipe_head_rank.py: stages share the head."""

    def test_two_stages_train_as_one_process(self) -> None:
        self.run_well(2, "pipe_head_rank.py", "two", "tied", "refusals", "own_programs", "caught")

    @tier.long
    def test_two_and_four_stages_with_replicas(self) -> None:
        self.run_well(2, "pipe_head_rank.py", "more", "transformers_loss")
        self.run_well(4, "pipe_head_rank.py", "four")

    @tier.long
    def test_stages_of_zero_have_the_same_bits(self) -> None:
        self.run_well(2, "pipe_rank.py", "head 2")
        self.run_well(4, "pipe_rank.py", "head 4")

    @tier.long
    def test_ranks_of_every_axis_share_them(self) -> None:
        self.run_well(4, "pipe_head_rank.py", "tp_and_sp", "axes")
        self.run_well(8, "pipe_head_rank.py", "eight")
        for ranks in (4, 8, 16):
            self.run_well(ranks, "pipe_rank.py", f"cover head {ranks}", limit_s=900)

    def test_the_rows_of_meshes_have_each_two(self) -> None:
        factors = {
            "schedule": (lambda row: row.schedule, SCHEDULES),
            "way": (lambda row: row.vocabulary, WAYS),
            "ZeRO stage": (lambda row: row.stage, range(4)),
            "axis": (lambda row: "sp" if row.sp > 1 else "tp", ("tp", "sp")),
        }
        for (one, (of, values)), (other, (of_other, others)) in itertools.combinations(factors.items(), 2):
            if {one, other} == {"schedule", "ZeRO stage"}:
                continue
            found = {(of(row), of_other(row)) for row in HEADS}
            self.assertEqual(set(itertools.product(values, others)) - found, set(), f"{one} and {other}")
        meshes = {(row.tp, row.sp, row.dp) for row in HEADS}
        self.assertEqual(len(meshes), 6)

    @tier.long
    def test_every_schedule_in_both_ways(self) -> None:
        for ranks in (2, 3, 4):
            self.run_well(ranks, "pipe_head_rank.py", "grid", limit_s=900)

    @tier.long
    def test_a_head_that_is_tied_to_its_embedding(self) -> None:
        self.run_well(2, "pipe_head_rank.py", "tied_tiles", "tied_specs")
        self.run_well(2, "pipe_rank.py", "tied 2")
        self.run_well(4, "pipe_rank.py", "tied 4")
        self.run_well(4, "pipe_head_rank.py", "tied_states")

    @tier.long
    def test_a_tied_head_under_every_schedule_in_both_ways(self) -> None:
        for ranks in (2, 3, 4):
            self.run_well(ranks, "pipe_rank.py", f"tied grid {ranks}", limit_s=900)


class Late(job.RankTest):
    """pipe_late_rank.py: schedule "ouroboros" against a reference by hand."""

    def late(self, ranks: int, *names: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            done = job.run(ranks, "pipe_late_rank.py", folder, *names)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_gradients_are_those_of_a_late_reference(self) -> None:
        said = self.late(2, "parity", "tied", "skipped", "checkpoints", "scales", "kept", "programs", "refusals")
        self.assertIn(
            "the run is inexact: pipeline schedule ouroboros, gradients of chunks are late by 1, 0 steps", said
        )
        self.assertEqual(said.count("late gradients are forgotten after a step that was skipped"), 1, said)
        self.late(3, "few", "kept")

    @tier.long
    def test_three_stages_and_replicas(self) -> None:
        self.late(3, "parity", "tied", "skipped", "checkpoints", "scales", "programs", "refusals")
        self.late(4, "replicas", "axes", "kept")


def ranks_of(mesh: str) -> int:
    return math.prod(map(int, mesh.split("x")))


class States(job.RankTest):
    """pipe_state_rank.py: a checkpoint of two stages loads on other meshes."""

    @tier.both
    def test_a_checkpoint_of_two_stages_loads_elsewhere(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            saved = self.states(2, "save", folder, 2, "1f1b")
            for ranks, stages, schedule in tier.rows(
                [(1, 1, "none"), (3, 3, "zb-h1"), (2, 2, "deferred"), (4, 2, "interleaved"), (2, 1, "none")],
                [(1, 1, "none"), (3, 3, "zb-h1")],
            ):
                loaded = self.states(ranks, "load", folder, stages, schedule)
                self.assertEqual(loaded[0], saved[0], (ranks, stages, schedule))
                if ranks == stages:  # else there are more samples
                    self.assertAlmostEqual(loaded[1], saved[1], 12)

    @tier.long
    def test_a_checkpoint_of_a_shared_head_loads_elsewhere(self) -> None:
        for mesh, save, loads in (
            ("2", "two_barriers", [("1", "whole"), ("3", "one_barrier"), ("2", "whole"), ("2", "two_barriers")]),
            ("2", "whole", [("2", "one_barrier"), ("3", "two_barriers"), ("2x2x2", "one_barrier")]),
            (
                "2x2",
                "two_barriers",
                [("1", "whole"), ("2", "one_barrier"), ("2x1x2", "two_barriers"), ("2x2", "whole")],
            ),
            ("2x1x2", "one_barrier", [("1", "whole"), ("2x2", "one_barrier")]),
        ):
            for model in ("llama", "qwen2"):  # the head of the second one is its embedding
                with self.subTest(mesh=mesh, save=save, model=model), tempfile.TemporaryDirectory() as folder:
                    saved = self.states(ranks_of(mesh), "save", folder, mesh, "1f1b", save, model)
                    for number, (other, way) in enumerate(loads):
                        replicas = 2 if number == 3 and mesh == "2" else 1
                        ranks = replicas * ranks_of(other)
                        schedule = "1f1b" if other != "1" else "none"
                        loaded = self.states(ranks, "load", folder, other, schedule, way, model)
                        self.assertEqual(loaded[0], saved[0], (save, mesh, other, way, model))
                        if replicas == 1:
                            self.assertAlmostEqual(loaded[1], saved[1], 12)

    def states(
        self, ranks: int, what: str, folder: str, mesh: str | int, schedule: str, *head: str
    ) -> tuple[str, float]:
        """Digests of weights and moments, and the loss of the step after. `head`: how stages share that of a model, and
        the model."""
        out = self.run_well(ranks, "pipe_state_rank.py", what, folder, str(mesh), schedule, *head)
        lines = [line.partition("] ")[2] if line.startswith("[") else line for line in out.splitlines()]
        digests = next(line for line in lines if line.startswith("weights"))
        after = next(line for line in lines if line.startswith("after")).split()[1]
        return digests, float(after)


class Links(job.RankTest):
    def test_slices_between_stages_and_statistics_of_all_stages(self) -> None:
        self.run_well(4, "pipe_links_rank.py")


class Engines(job.RankTest):
    """pipe_more_rank.py, pipe_values_rank.py."""

    def test_what_engines_of_two_stages_can_do(self) -> None:
        cases = ("outputs", "outputs_beside_losses", "outputs_of_every_kind", "steered", "deepspeed_module",
                 "one_stage", "evaluations", "cast_inputs", "measured", "programs", "refusals")  # fmt: skip
        self.run_well(2, "pipe_more_rank.py", *cases)

    def test_programs_with_more_actions_have_the_bits_of_the_plain_one(self) -> None:
        self.run_well(2, "pipe_actions_rank.py", "recomputed", "moved", "cut")
        self.run_well(4, "pipe_actions_rank.py", "gathered")

    def test_layers_of_every_kind_train_in_two_stages(self) -> None:
        self.run_well(2, "pipe_values_rank.py", "dicts", "stashes", "convolutions", "overflow")

    @tier.long
    def test_outputs_of_two_pipelines(self) -> None:
        self.run_well(4, "pipe_more_rank.py", "outputs_of_pipelines")

    def test_the_stage_with_the_fault_is_named_on_all_ranks(self) -> None:
        for case, rank, fault in (
            (
                "no_loss",
                1,
                "the last chunk of a pipeline gives no loss; .*which: (1F0|action 1F0 of step 1 .*); .*got: no tensor; "
                "hint: the last layer returns the loss",
            ),
            ("not_to_be_sent", 0, "a value of the model cannot be sent to another rank; .*which: SimpleNamespace"),
        ):
            with self.subTest(case):
                done = job.run(2, "pipe_more_rank.py", case)
                self.assertEqual(done.returncode, 65, done.stdout + done.stderr)
                self.assertRegex(done.stderr, rf"\[ABORTED\] rank {rank} stopped the job: \[MODEL\] {fault}")
                self.assertRegex(done.stderr, rf"zeroth-run: rank {rank} .* exited with code 65: .*\[MODEL\] {fault}")


class Trainer(unittest.TestCase):
    """examples/gpt/train.py --mesh pp=N."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (cls.folder / "text").mkdir()
        sentence = "the cat that sat on the mat sees a rat and the rat sees that the cat is fat\n"
        (cls.folder / "text/sentences.txt").write_text("".join(f"{number} {sentence}" for number in range(60)))

    def train(self, ranks: int, *arguments: str) -> tuple[list[dict[str, Any]], str]:
        """Records and output of a run; 1 rank: a bare process."""
        records = self.folder / "records"
        small = ["--layers", "4", "--d-model", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "4"]
        # Three windows of validation: the last micro-batch of a rank is smaller, or has no weight.
        more = ["--eval-windows", "3", "--sample", "8", "--data", str(self.folder / "text"), "--json", str(records)]
        launcher = [job.RUN, "-n", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [*launcher, *forked.python(), str(TRAIN), *small, *more, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=job.TIME_LIMIT_S,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in records.read_text().splitlines()], done.stdout

    def require_true(self, final: dict[str, Any]) -> None:
        """Planned bytes are measured, and bytes of the formula are counted."""
        self.assertEqual(final["planned_bytes"], final["measured_bytes"])
        self.assertEqual(final["wire_bytes"], final["wire_formula_bytes"])
        self.assertGreater(final["pss_peak_bytes"], 0)

    def sample(self, output: str) -> str:
        found = re.search(r"--- sample.*---\n(.*)\n", output)
        assert found is not None, output
        return found[1].removeprefix("[0] ")

    def test_two_stages_give_the_losses_of_one_process(self) -> None:
        """Bit for bit: the sums of a parameter's gradients are in the same order. Without clipping: norms are not."""
        alone, alone_said = self.train(1, "--accumulate", "4", "--zero-stage", "1", "--clip", "0")
        staged, said = self.train(2, "--mesh", "pp=2", "--accumulate", "4", "--zero-stage", "1", "--clip", "0")
        self.assertEqual(len(staged), 5)
        self.assertEqual([one.get("loss_hex") for one in staged], [one.get("loss_hex") for one in alone])
        for own, expected in zip(staged[:-1], alone[:-1], strict=True):
            self.assertAlmostEqual(own["grad_norm"], expected["grad_norm"], delta=1e-6 * expected["grad_norm"])
        self.assertAlmostEqual(staged[-1]["validation_loss"], alone[-1]["validation_loss"], delta=1e-12)
        self.assertEqual(self.sample(said), self.sample(alone_said))
        self.assertIn("1 groups of 2 ranks x 4 micro-steps", said)
        self.require_true(staged[-1])

    @tier.long
    def test_meshes_give_the_losses_of_data_parallel_ranks(self) -> None:
        """Sums over ranks are in another order: to 1e-6 of the value."""
        for mesh, ranks, others in (("pp=4", 4, 1), ("pp=2,dp=2", 4, 2), ("pp=2,tp=2", 4, 1)):
            for stage in range(4):
                arguments = ("--accumulate", "3", "--zero-stage", str(stage))
                flat, flat_said = self.train(others, *arguments)
                staged, said = self.train(ranks, "--mesh", mesh, *arguments)
                with self.subTest(mesh=mesh, stage=stage):
                    for own, expected in zip(staged[:-1], flat[:-1], strict=True):
                        self.assertAlmostEqual(own["loss"], expected["loss"], delta=1e-6 * expected["loss"])
                    self.assertAlmostEqual(staged[-1]["validation_loss"], flat[-1]["validation_loss"], delta=1e-6)
                    self.assertEqual(self.sample(said), self.sample(flat_said))
                    self.require_true(staged[-1])

    @tier.long
    def test_a_checkpoint_of_two_stages_goes_on_without(self) -> None:
        checkpoints = str(self.folder / "checkpoints")
        self.train(2, "--mesh", "pp=2", "--steps", "2", "--checkpoints", checkpoints)
        runs = [
            self.train(ranks, *mesh, "--steps", "4", "--resume", checkpoints)[0]
            for ranks, mesh in ((1, ()), (2, ("--mesh", "pp=2")), (4, ("--mesh", "pp=4")))
        ]
        for other in runs[1:]:
            self.assertEqual([one["step"] for one in other[:-1]], [3, 4])
            self.assertEqual([one.get("loss_hex") for one in other], [one.get("loss_hex") for one in runs[0]])


class Example(unittest.TestCase):
    def losses(self, ranks: int, *arguments: str) -> tuple[str, list[tuple[float, float]]]:
        """Output, and the losses of the pipeline and of one process."""
        small = ["--size", "32", "--length", "30", "--layers", "2", "--steps", "4", "--every", "2", "--batch", "2"]
        done = subprocess.run(
            [job.RUN, "-n", str(ranks), *forked.python(), str(EXAMPLE), str(EXAMPLES), *small, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=job.TIME_LIMIT_S,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        lines = [line.split() for line in done.stdout.splitlines() if " alone " in line]
        return done.stdout, [(float(line[-5]), float(line[-1])) for line in lines]

    def check(self, losses: list[tuple[float, float]]) -> None:
        self.assertEqual(len(losses), 2)
        for own, alone in losses:
            self.assertAlmostEqual(own, alone, delta=1e-5)

    def test_it_is_short_and_has_the_losses_of_one_process(self) -> None:
        self.assertLessEqual(job.statements(EXAMPLE), 50)
        said, losses = self.losses(2)
        self.check(losses)
        for text in (
            "pipeline of 2 stages, 2 chunks, 4 micro-batches a step",
            "stage 1: chunk 1: transformer.h.1 to head",
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2",
            "logits [2, 30, 256]",
        ):
            self.assertIn(text, said)

    @tier.long
    def test_it_takes_other_schedules_and_more_ranks(self) -> None:
        self.check(self.losses(4, "--schedule", "zb-h1", "--stage", "3")[1])
        self.check(self.losses(4, "--pp", "4", "--micro", "8")[1])


if __name__ == "__main__":
    tier.main()
