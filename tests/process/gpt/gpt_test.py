#!/usr/bin/env python3
"""zeroth-gpt as a user starts it, with small models: bits across stages, records, exported weights, bad input.

usage: gpt_test.py ZEROTH_RUN ZEROTH_GPT
"""

import json
import os
import pathlib
import random
import shlex
import subprocess
import sys
import tempfile
import unittest
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import tier  # noqa: E402

RUN, GPT = sys.argv[1:3]
SEQ = 32
MODEL = ["--layers", "3", "--d-model", "32", "--heads", "2", "--seq", str(SEQ), "--batch", "2", "--eval-windows", "5"]
WORDS = "def return if else for in while class import from self none true false and or not with as pass".split()


def text(seed: int, length: int) -> str:
    source = random.Random(seed)
    words = []
    while len(words) * 4 < length:
        words.append(source.choice(WORDS) + source.choice([" ", " ", "\n", "(", "): "]))
    return "".join(words)[:length]


class GptTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.data = self.folder / "data"
        self.data.mkdir()
        for i in range(3):
            (self.data / f"{i}.txt").write_text(text(i, 2500))

    def start(self, ranks: int, *arguments: str, env: dict[str, str] | None = None, data: bool = True) -> Any:
        command = [RUN, "-n", str(ranks), GPT] if ranks > 0 else [GPT]
        command += ["--data", str(self.data), *MODEL] if data else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        return subprocess.run(command + list(arguments), capture_output=True, text=True, timeout=60, env=environment)

    def train(self, ranks: int, *arguments: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Records of the steps and the final one."""
        path = self.folder / "records"
        done = self.start(ranks, "--json", str(path), *arguments, **options)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.output = done.stdout
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return records[:-1], records[-1]

    def fails(self, ranks: int, code: int, *arguments: str, **options: Any) -> str:
        done = self.start(ranks, *arguments, **options)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stderr

    # --- training -------------------------------------------------------------------------------------------------

    @tier.both
    def test_all_stages_give_the_same_bits(self) -> None:
        every = [(dtype, accumulate) for dtype in ("fp32", "bf16", "fp64") for accumulate in ("1", "2")]
        for dtype, accumulate in tier.rows(every, [("fp32", "2"), ("bf16", "1")]):
            traces = {}
            for stage in range(4):
                arguments = ["--zero-stage", str(stage), "--dtype", dtype, "--accumulate", accumulate, "--steps", "4"]
                steps, final = self.train(2, *arguments)
                traces[stage] = [(step["loss_hex"], step["grad_norm"]) for step in steps] + [final["validation_loss"]]
            with self.subTest(dtype=dtype, accumulate=accumulate):
                self.assertEqual(len(traces[0]), 5)
                for stage in range(1, 4):
                    self.assertEqual(traces[stage], traces[0], f"stage {stage}")

    @tier.both
    def test_ranks_that_share_matrices_or_sequences_are_like_one(self) -> None:
        """dp=2 with tp=2 and sp=2 against two ranks with whole matrices and sequences, through checkpoints of either,
        too. float32: the ranks add up parts of products."""

        def losses(ranks: int, *arguments: str) -> list[float]:
            steps, final = self.train(ranks, "--steps", "5", *arguments)
            measured = final["measured_bytes"]
            measured["total"] -= measured["overflow"]  # where ranks are in each other's way, on few cores
            measured["overflow"] = 0
            self.assertEqual(final["planned_bytes"], measured)
            self.assertEqual(final["wire_bytes"], final["wire_formula_bytes"])
            self.assertEqual(final["parameters"], 48352)
            return [step["loss"] for step in steps] + [final["validation_loss"]]

        def assert_close(got: list[float], expected: list[float]) -> None:
            self.assertEqual(len(got), len(expected))
            for one, other in zip(got, expected, strict=True):
                self.assertAlmostEqual(one, other, delta=1e-5 * other)

        saved = ["--save-every", "2", "--accumulate", "2", "--checkpoints"]
        expected = losses(2, *saved, str(self.folder / "whole"))
        self.assertGreater(abs(expected[0] - expected[-2]), 1e-2, "there was something to learn")
        every = [("tp", 0), ("tp", 3), ("sp", 3), ("tp", 1), ("tp", 2), ("sp", 0), ("sp", 1), ("sp", 2)]
        runs: dict[str, list[tuple[list[float], bytes]]] = {"tp": [], "sp": []}
        for axis, stage in every[1:] if tier.LONG else every[:3]:
            path = self.folder / f"{axis}{stage}"
            arguments = ["--mesh", f"dp=2,{axis}=2", "--zero-stage", str(stage), "--export", f"{path}.safetensors"]
            got = losses(4, *arguments, *saved, str(path))
            assert_close(got, expected)
            runs[axis].append((got, pathlib.Path(f"{path}.safetensors").read_bytes()))
            self.assertEqual(runs[axis][-1], runs[axis][0], f"{axis}=2 at stage {stage}")
        self.assertIn(", 2 groups of 2 ranks x 2 micro-steps x 2 sequences = 8 sequences a step", self.output)
        go_on = ["--accumulate", "2", "--resume"]
        assert_close(losses(2, *go_on, str(self.folder / "tp3" / "step-00000002")), expected[2:])
        assert_close(losses(4, "--mesh", "tp=2", *go_on, str(self.folder / "whole" / "step-00000002")), expected[2:])

    @tier.both
    def test_stages_of_a_pipeline_are_like_one_process(self) -> None:
        """Float64, with data-parallel ranks beside the stages, and through checkpoints of either, too. The embedding
        is on the first and the last stage: each adds up its gradients of all micro-batches before they are added to the
        other's, so with several micro-batches the last bits differ."""
        more = ["--dtype", "fp64", "--accumulate", "4", "--sample", "20"]
        saved = ["--steps", "4", "--save-every", "2", "--checkpoints"]

        def train(ranks: int, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
            steps, final = self.train(ranks, *more, *arguments)
            return steps, final, self.output.partition("--- sample")[2].partition("--- end")[0]

        # By the number of data-parallel ranks: those have batches of their own.
        whole = {1: train(1, *saved, str(self.folder / "whole"))}
        if tier.LONG:
            whole[2] = train(2, "--steps", "4")
        expected, last, _ = whole[1]
        self.assertGreater(abs(expected[0]["loss"] - expected[-1]["loss"]), 1e-2, "there was something to learn")
        every = [
            (2, "pp=2", "1f1b", 3),
            (4, "pp=2,dp=2", "interleaved", 1),
            (4, "pp=2,tp=2", "zb-h1", 3),
            (3, "pp=3", "gpipe", 0),
            (2, "pp=2", "1f1b", 1),
            (2, "pp=2", "interleaved", 3),
            (2, "pp=2", "zb-h1", 1),
            (4, "pp=2,dp=2", "1f1b", 3),
            (4, "pp=2,sp=2", "zb-v", 2),
            (4, "pp=2,tp=2", "v-half", 1),
        ]
        saved_by_one = None  # a checkpoint of a pipeline that trained on the batches of one rank
        for index, (ranks, mesh, schedule, stage) in enumerate(tier.rows(every, every[:1])):
            expected, last, text = whole[2 if "dp=2" in mesh else 1]
            path = self.folder / str(index)
            if saved_by_one is None and "dp=2" not in mesh:
                saved_by_one = path
            config = self.folder / "zero.json"
            config.write_text(json.dumps({"zeroth": {"pipeline": {"schedule": schedule}}}))
            arguments = ["--mesh", mesh, "--config", str(config), "--zero-stage", str(stage)]
            steps, final, sample = train(ranks, *arguments, *saved, str(path))
            with self.subTest(mesh=mesh, schedule=schedule):
                self.assertEqual(len(steps), len(expected))
                if mesh == "pp=2":
                    self.assertEqual(steps[0]["loss_hex"], expected[0]["loss_hex"])
                for got, other in zip([*steps, final], [*expected, last], strict=True):
                    for key in {"loss", "grad_norm", "validation_loss"} & other.keys():
                        self.assertAlmostEqual(got[key], other[key], delta=1e-12, msg=key)
                self.assertEqual(sample, text)
                self.assertEqual(final["parameters"], last["parameters"])
                measured = final["measured_bytes"]
                measured["total"] -= measured["overflow"]  # where ranks are in each other's way, on few cores
                measured["overflow"] = 0
                self.assertEqual(final["planned_bytes"], measured)
                self.assertEqual(final["wire_bytes"], final["wire_formula_bytes"])
        expected, last, _ = whole[1]
        assert saved_by_one is not None
        for ranks, arguments, folder in ((1, [], saved_by_one), (2, ["--mesh", "pp=2"], self.folder / "whole")):
            steps, final, _ = train(ranks, *arguments, "--steps", "4", "--resume", str(folder / "step-00000002"))
            with self.subTest("goes on", ranks=ranks):
                self.assertEqual([step["step"] for step in steps], [3, 4])
                self.assertAlmostEqual(steps[-1]["loss"], expected[-1]["loss"], delta=1e-12)
                self.assertAlmostEqual(final["validation_loss"], last["validation_loss"], delta=1e-12)

    @tier.both
    def test_ranks_with_other_experts_are_like_ranks_with_all(self) -> None:
        """Float64, through checkpoints of either. Between stages: the same bits."""
        model = ["--experts", "4", "--dtype", "fp64", "--sample", "20"]
        saved = ["--steps", "4", "--save-every", "2", "--checkpoints"]

        def train(ranks: int, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
            steps, final = self.train(ranks, *model, *arguments)
            measured = final["measured_bytes"]
            measured["total"] -= measured["overflow"]  # where ranks are in each other's way, on few cores
            measured["overflow"] = 0
            self.assertEqual(final["planned_bytes"], measured)
            self.assertEqual(final["wire_bytes"], final["wire_formula_bytes"])
            return steps, final, self.output.partition("--- sample")[2].partition("--- end")[0]

        def assert_like(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
            self.assertEqual([step["step"] for step in got], [step["step"] for step in expected])
            for step, other in zip(got, expected, strict=True):
                self.assertAlmostEqual(step["loss"], other["loss"], delta=1e-12)
                self.assertAlmostEqual(step["grad_norm"], other["grad_norm"], delta=1e-11)

        # By the number of data-parallel ranks: those have batches of their own.
        whole = {4: train(4, *saved, str(self.folder / "whole"))}
        if tier.LONG:
            whole[2] = train(2, "--accumulate", "2", "--steps", "4")
        expected, last, text = whole[4]
        self.assertGreater(abs(expected[0]["loss"] - expected[-1]["loss"]), 1e-2, "there was something to learn")
        every = [
            ("ep=2,dp=2", 2),
            ("ep=2,dp=2", 3),
            ("ep=4", 3),
            ("ep=2,dp=2", 0),
            ("ep=2,dp=2", 1),
            ("ep=4", 0),
            ("ep=2,tp=2", 3),
            ("ep=2,sp=2", 2),
            ("pp=2,ep=2", 1),
        ]
        bits = {}
        saved_by_four = None
        for index, (mesh, stage) in enumerate(tier.rows(every, every[:2])):
            data_ranks = 4 if mesh in ("ep=2,dp=2", "ep=4") else 2
            path = self.folder / str(index)
            arguments = ["--mesh", mesh, "--zero-stage", str(stage)]
            arguments += [] if data_ranks == 4 else ["--accumulate", "2"]
            with self.subTest(mesh=mesh, stage=stage):
                steps, final, sample = train(4, *arguments, *saved, str(path))
                assert_like(steps, whole[data_ranks][0])
                self.assertAlmostEqual(final["validation_loss"], whole[data_ranks][1]["validation_loss"], delta=1e-12)
                self.assertEqual(sample, whole[data_ranks][2])
                self.assertEqual(final["parameters"], last["parameters"])
                trace = [(step["loss_hex"], step["grad_norm"]) for step in steps]
                self.assertEqual(bits.setdefault(mesh, trace), trace, "stages have other bits")
                if data_ranks == 4:
                    saved_by_four = path
        assert saved_by_four is not None
        for mesh, folder in (([], saved_by_four), (["--mesh", "ep=4"], self.folder / "whole")):
            with self.subTest("goes on", mesh=mesh):
                steps, final, _ = train(4, *mesh, "--steps", "4", "--resume", str(folder / "step-00000002"))
                assert_like(steps, expected[2:])
                self.assertAlmostEqual(final["validation_loss"], last["validation_loss"], delta=1e-12)

    @tier.both
    def test_a_pipeline_with_one_micro_batch_has_the_bits_of_one_process(self) -> None:
        """Then both sums over the embedding's uses have two terms."""
        expected, last = self.train(1, "--steps", "3")
        for stage in tier.rows("0123", "3"):
            steps, final = self.train(2, "--steps", "3", "--mesh", "pp=2", "--zero-stage", stage)
            with self.subTest(stage=stage):
                self.assertEqual([step["loss_hex"] for step in steps], [step["loss_hex"] for step in expected])
                self.assertEqual([step["grad_norm"] for step in steps], [step["grad_norm"] for step in expected])
                self.assertAlmostEqual(final["validation_loss"], last["validation_loss"], delta=1e-12)

    @tier.long
    def test_a_sequence_and_its_matrices_are_shared_unevenly(self) -> None:
        """Slices and heads of two sizes, and a prompt that is shorter than ranks."""
        model = ["--heads", "6", "--d-model", "36", "--seq", "31", "--sample", "40", "--prompt", "d", "--dtype", "fp64"]
        expected, _ = self.train(1, *model, "--steps", "4")
        text = self.output.partition("--- sample")[2].partition("--- end")[0]
        for ranks, mesh in ((4, "sp=4"), (4, "sp=2,tp=2"), (6, "sp=2,tp=3")):
            got, _ = self.train(ranks, *model, "--steps", "4", "--mesh", mesh)
            with self.subTest(mesh):
                for step, other in zip(got, expected, strict=True):
                    self.assertAlmostEqual(step["loss"], other["loss"], delta=1e-12)
                    self.assertAlmostEqual(step["grad_norm"], other["grad_norm"], delta=1e-11)
                self.assertEqual(self.output.partition("--- sample")[2].partition("--- end")[0], text)

    def test_records_say_what_was_asked_for(self) -> None:
        steps, final = self.train(2, "--steps", "3", "--accumulate", "2", "--zero-stage", "3")
        self.assertEqual([step["step"] for step in steps], [1, 2, 3])
        for step in steps:
            self.assertEqual(float.fromhex(step["loss_hex"]), step["loss"])
            self.assertEqual(step["tokens"], 2 * 2 * 2 * SEQ)
            self.assertGreater(step["grad_norm"], 0)
            self.assertGreater(step["seconds"], 0)
        self.assertEqual(final["steps"], 3)
        self.assertEqual(final["world_size"], 2)
        self.assertEqual(final["planned_bytes"], final["measured_bytes"])
        self.assertEqual(final["wire_bytes"], final["wire_formula_bytes"])
        self.assertGreater(final["wire_bytes"]["all_gather"], 0)
        # Both ranks' engines are in it, and torch besides.
        self.assertGreater(final["pss_peak_bytes"], 2 * final["measured_bytes"]["total"])
        self.assertGreater(final["live_slots_peak"], 0)

    def test_a_processor_without_avx2_is_told_and_computes_the_same(self) -> None:
        arguments = ["--steps", "3", "--zero-stage", "3"]
        expected, _ = self.train(2, *arguments)
        done = self.start(2, *arguments, env={"ZEROTH_ISA": "scalar"})
        self.assertIn("kernels run scalar code", done.stdout + done.stderr)
        got, _ = self.train(2, *arguments, env={"ZEROTH_ISA": "scalar"})
        self.assertEqual([step["loss_hex"] for step in got], [step["loss_hex"] for step in expected])
        self.assertEqual([step["grad_norm"] for step in got], [step["grad_norm"] for step in expected])
        error = self.fails(2, 77, *arguments, env={"ZEROTH_ISA": "avx"})
        self.assertIn("ENVIRONMENT", error)
        self.assertIn("ZEROTH_ISA", error)

    @tier.both
    def test_loss_falls_on_every_kind_of_world(self) -> None:
        for ranks in tier.rows((0, 1, 2, 3), (0, 2)):
            steps, final = self.train(ranks, "--steps", "60", "--lr", "0.01", "--zero-stage", "3")
            with self.subTest(ranks=ranks):
                self.assertEqual(final["world_size"], max(1, ranks))
                self.assertLess(steps[-1]["loss"], 0.7 * steps[0]["loss"])
                self.assertLess(final["validation_loss"], 0.7 * steps[0]["loss"])

    def test_a_run_is_repeated_bit_by_bit_and_seeds_differ(self) -> None:
        first, _ = self.train(2, "--steps", "3")
        again, _ = self.train(2, "--steps", "3")
        other, _ = self.train(2, "--steps", "3", "--seed", "2")
        losses = [[step["loss_hex"] for step in run] for run in (first, again, other)]
        self.assertEqual(losses[0], losses[1])
        self.assertNotEqual(losses[0], losses[2])

    def test_the_sample_does_not_depend_on_the_stage(self) -> None:
        samples = []
        for stage in ("0", "3"):
            self.train(2, "--zero-stage", stage, "--steps", "2", "--sample", "50", "--prompt", "def ")
            samples.append([line for line in self.output.splitlines() if "step" not in line and "ZeRO" not in line])
            self.assertIn('after the prompt "def "', self.output)
        begin = [next(i for i, line in enumerate(lines) if "--- sample" in line) for lines in samples]
        end = [next(i for i, line in enumerate(lines) if "--- end" in line) for lines in samples]
        self.assertEqual(samples[0][begin[0] : end[0]], samples[1][begin[1] : end[1]])

    def test_stops_at_the_target_and_at_the_time(self) -> None:
        steps, final = self.train(2, "--steps", "400", "--lr", "0.01", "--target", "4.5", "--eval-every", "5")
        self.assertTrue(final["target_reached"])
        self.assertLess(len(steps), 400)
        self.assertEqual(len(steps) % 5, 0)
        steps, final = self.train(2, "--steps", "1000000", "--max-seconds", "1")
        self.assertFalse(final["target_reached"])
        self.assertLess(len(steps), 1000000)

    def test_exported_weights_give_the_same_loss_in_plain_pytorch(self) -> None:
        import reference_model
        import torch

        path = self.folder / "weights.safetensors"
        _, final = self.train(2, "--steps", "30", "--lr", "0.01", "--zero-stage", "3", "--export", str(path))
        weights = reference_model.read_safetensors(path)
        self.assertEqual(sum(tensor.numel() for tensor in weights.values()), final["parameters"])
        held_out = b"".join(file.read_bytes() for file in sorted(self.data.iterdir()))[-750:]
        available = len(held_out) // (SEQ + 1)
        starts = [i * available // 5 * (SEQ + 1) for i in range(5)]
        windows = torch.tensor([list(held_out[start : start + SEQ + 1]) for start in starts])
        self.assertAlmostEqual(reference_model.loss(weights, windows, heads=2), final["validation_loss"], delta=1e-5)

    def test_a_configuration_file_is_followed_and_overridden(self) -> None:
        config = self.folder / "zero.json"
        config.write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}')
        steps, final = self.train(2, "--config", str(config), "--steps", "3")
        self.assertEqual(final["zero_stage"], 1)
        self.assertEqual([step["lr"] for step in steps], [0.0] * 3)
        _, final = self.train(2, "--config", str(config), "--steps", "1", "--zero-stage", "2")
        self.assertEqual(final["zero_stage"], 2)
        self.assertIn("--zero-stage: /zero_optimization/stage = 2 replaces 1", self.output)

    # --- bad input ------------------------------------------------------------------------------------------------

    def test_help_needs_nothing(self) -> None:
        done = self.start(0, "--help", data=False)
        self.assertEqual(done.returncode, 0)
        self.assertIn("--zero-stage", done.stdout)

    def test_bad_input_ends_every_rank_with_its_code(self) -> None:
        for code, slug, arguments in (
            (74, "IO", ["--data", str(self.folder / "missing")]),
            (64, "USAGE", ["--data", str(self.data), "--seq", "100000"]),
            (64, "USAGE", ["--data", str(self.data), "--layer", "2"]),
            (64, "USAGE", ["--data", str(self.data), "--zero-stage", "4"]),
            (78, "CONFIG", ["--data", str(self.data), "--mesh", "dp=1"]),
            (65, "MODEL", ["--data", str(self.data), "--mesh", "tp=2", *MODEL, "--heads", "1"]),
            (64, "USAGE", ["--data", str(self.data), "--mesh", "sp=2", *MODEL, "--heads", "1"]),
            (78, "CONFIG", ["--data", str(self.data), "--mesh", "pp=3"]),
            (64, "USAGE", []),
        ):
            with self.subTest(arguments=arguments):
                stderr = self.fails(2, code, *arguments, data=False)
                self.assertIn(f"ZEROTH ERROR [{slug}] rank=", stderr)

    def test_a_misspelt_key_names_file_line_and_neighbour(self) -> None:
        config = self.folder / "zero.json"
        config.write_text('{\n"gradient_cliping": 1.0\n}')
        stderr = self.fails(2, 78, "--config", str(config))
        self.assertIn("zero.json:2", stderr)
        self.assertIn("gradient_clipping", stderr)

    def test_ranks_with_different_text_or_threads_stop(self) -> None:
        other = self.folder / "other"
        other.mkdir()
        (other / "0.txt").write_text(text(9, 5000))
        wrapper = self.folder / "wrapper"
        for what, line in (
            ("text", f'[ "$RANK" = 1 ] && data={other}'),
            ("number of threads", '[ "$RANK" = 1 ] && export OMP_NUM_THREADS=2'),
        ):
            model = " ".join(MODEL)
            wrapper.write_text(f"#!/bin/sh\ndata={self.data}\n{line}\nexec {GPT} --data $data {model} --steps 2\n")
            wrapper.chmod(0o755)
            command = [RUN, "-n", "3", "--env", "OMP_NUM_THREADS=1", wrapper]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            with self.subTest(what=what):
                self.assertEqual(done.returncode, 76, done.stdout + done.stderr)
                self.assertRegex(done.stderr, rf"ZEROTH ERROR \[MISMATCH\] rank=./3: the ranks differ in the {what}")

    @tier.both
    def test_ranks_that_share_matrices_have_one_seed_and_one_sample(self) -> None:
        weights = self.folder / "weights"
        self.train(0, "--steps", "0", "--export", str(weights))
        wrapper = self.folder / "wrapper"
        arguments = ["--data", str(self.data), *MODEL, "--steps", "2"]
        same = ["--init", str(weights)]
        every = [(["--mesh", f"{axis}=2", *given], given) for axis in ("tp", "sp") for given in ([], same)]
        for given, init in tier.rows(every, [every[0], every[3]]):
            shared = "matrices" if "tp=2" in given else "sequences"
            what = "a model were given different batches" if init else f"{shared} have other weights"
            which = f"{'tensor 0' if init else 'embedding'} on rank 1 of "
            wrapper.write_text(f"#!/bin/sh\nexec {GPT} {shlex.join([*arguments, *given])} --seed $RANK\n")
            wrapper.chmod(0o755)
            done = subprocess.run([RUN, "-n", "2", wrapper], capture_output=True, text=True, timeout=60)
            with self.subTest(what):
                self.assertEqual(done.returncode, 76, done.stdout + done.stderr)
                for rank in (0, 1):
                    self.assertRegex(
                        done.stderr,
                        rf"ZEROTH ERROR \[MISMATCH\] rank={rank}/2: ranks that share {what}.*which: {which}",
                    )

    def test_a_bare_world_variable_is_refused(self) -> None:
        done = self.start(0, env={"RANK": "3", "WORLD_SIZE": "2"})
        self.assertEqual(done.returncode, 77)
        self.assertIn("ZEROTH ERROR [ENVIRONMENT] rank=?/?", done.stderr)

    def test_a_failing_export_is_an_error_on_every_rank(self) -> None:
        stderr = self.fails(2, 74, "--steps", "1", "--export", str(self.folder / "no" / "where.safetensors"))
        self.assertIn("where.safetensors", stderr)


if __name__ == "__main__":
    del sys.argv[1:3]
    tier.main()
