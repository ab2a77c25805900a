"""The trainer examples/gpt beside its twin in C++, as a user starts them, with small models: the same arguments,
records, lines and bits; its own pictures and progress bar; and how bad input ends."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import forked
import job
import tier
import torch
from safetensors.torch import load_file, save_file

import zeroth

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "gpt"
TRAIN = EXAMPLE / "train.py"
CPP = os.environ["ZEROTH_GPT"]
"""path of zeroth-gpt, from CMake"""
sys.path.insert(0, str(EXAMPLE))
import data  # noqa: E402
import errors  # noqa: E402
import options  # noqa: E402
import report  # noqa: E402
import settings  # noqa: E402
import weights  # noqa: E402
from model import Gpt, ModelOptions  # noqa: E402
from trainer import make_stages  # noqa: E402

SEQ = 32
MODEL = ["--layers", "2", "--d-model", "32", "--heads", "2", "--seq", str(SEQ), "--batch", "2", "--eval-windows", "5"]
ONLY_IN_PYTHON = {"--bar", "--no-bar", "--plot"}
MESHES_THAT_ARE_NONE = (
    "",
    "dp",
    "tp=",
    "tp=0",
    "tp=-2",
    "tp=2,",
    "tp=2,tp=2",
    "dp=2;tp=2",
    "cp=2",
    "tp=99999999",
    "tp=2 ",
)
MEASURED = {"seconds", "tokens_per_second", "pss_peak_bytes"}
"""keys of the records that differ from run to run"""
Records = list[dict[str, Any]]


def text(seed: int, length: int) -> str:
    source = random.Random(seed)
    words = "def return if else for in while class import from self none true false".split()
    return "".join(source.choice(words) + source.choice(" \n(:") for _ in range(length))[:length]


def exact(records: Records) -> list[list[tuple[str, Any]]]:
    """Keys in their order, and all values that are computed."""
    return [[(key, None if key in MEASURED else value) for key, value in record.items()] for record in records]


def lines(output: str) -> list[str]:
    """What both trainers say of the same run: without the origins of the configuration and what is measured."""
    said = [re.sub(r"[\d,]+ tokens/s|PSS of all ranks: .*|written to .*", "~", line) for line in output.splitlines()]
    return [line for line in said if "info: config" not in line and "pictures" not in line]


class Trainers(unittest.TestCase):
    """Runs of both trainers on one small text."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.text = cls.folder / "text"
        for index, name in enumerate(("b.txt", "B.txt", "deep/c.txt", "skip/d.txt", "e.md")):
            path = cls.text / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(index, 2000))
        (cls.text / "binary.txt").write_bytes(b"x\0" * 50)
        (cls.text / "empty.txt").touch()
        (cls.text / "nowhere.txt").symlink_to("missing")
        cls.arguments = ["--data", str(cls.text), "--suffix", ".txt", "--exclude", "skip", *MODEL]

    def start(self, trainer: str, ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`trainer`: "cpp" or "python"; 0 ranks: a bare process."""
        program = [CPP] if trainer == "cpp" else [*forked.python(), str(TRAIN)]
        launcher = [job.RUN, "-n", str(ranks)] if ranks else []
        return subprocess.run(
            [*launcher, *program, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=job.TIME_LIMIT_S,
            check=False,
        )

    def train(self, trainer: str, *arguments: str, ranks: int = 2) -> tuple[Records, str]:
        """Records and output of a run."""
        path = self.folder / f"{trainer}.records"
        done = self.start(trainer, ranks, *self.arguments, "--json", str(path), *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in path.read_text().splitlines()], done.stdout

    def assert_picture(self, path: pathlib.Path) -> None:
        from matplotlib.image import imread

        pixels = imread(path)
        self.assertGreater(min(pixels.shape[:2]), 300)
        self.assertGreater(pixels.std(), 0.05, f"{path} is empty")

    # --- the same bits ----------------------------------------------------------------------------------------------

    def test_experts_have_the_same_bits(self) -> None:
        """Also where copies of them travel, or ranks of tp own others."""
        losses = []
        for mesh, keys in (("ep=2", {}), ("ep=2", {"meet": "tokens", "copies": 2}), ("tp=2", {"over": "ep,tp"})):
            path = self.folder / "experts.json"
            path.write_text(json.dumps({"zeroth": {"experts": keys}}))
            arguments = ("--experts", "4", "--mesh", mesh, "--steps", "3", "--config", str(path))
            cpp, python = (self.train(trainer, *arguments)[0] for trainer in ("cpp", "python"))
            self.assertEqual(exact(python), exact(cpp))
            losses.append([float.fromhex(step["loss_hex"]) for step in python if "loss_hex" in step])
        self.assertGreater(len(losses[0]), 2)
        for one, other in zip(*losses[:2], strict=True):
            self.assertAlmostEqual(one, other, delta=1e-3)  # float32

    @tier.both
    def test_the_same_initial_weights_give_the_same_bits(self) -> None:
        path = self.folder / "initial.safetensors"
        torch.manual_seed(5)
        save_file({name: torch.randn(value.shape) / 8 for name, value in small_model().state_dict().items()}, path)
        of_stages: dict[str, list[list[Any]]] = {"fp32": [], "bf16": [], "fp16": []}
        every = list(itertools.product(("fp32", "bf16", "fp16"), ("0", "3")))
        for dtype, stage in every if tier.LONG else [("fp32", "3"), ("bf16", "0"), ("fp16", "2")]:
            arguments = (
                "--init",
                str(path),
                "--dtype",
                dtype,
                "--zero-stage",
                stage,
                "--steps",
                "4",
                "--accumulate",
                "2",
                "--eval-every",
                "2",
                "--no-train-table",
            )
            with self.subTest(dtype=dtype, stage=stage):
                cpp, _ = self.train("cpp", *arguments)
                python, _ = self.train("python", *arguments)
                self.assertEqual(len(python), 5)
                self.assertGreater(python[0]["grad_norm"], 0)
                self.assertEqual(exact(python), exact(cpp))
                of_stages[dtype].append([(step["loss_hex"], step["grad_norm"]) for step in python[:-1]])
        for runs in of_stages.values():
            self.assertEqual(runs, runs[:1] * len(runs))
        # Weights that bfloat16 rounds: the losses of two dtypes differ by far more than any kernel's rounding.
        losses = [float.fromhex(of_stages[dtype][0][0][0]) for dtype in ("fp32", "bf16")]
        self.assertGreater(abs(losses[0] - losses[1]), 1e-5)

    def test_a_seed_alone_gives_the_same_weights_lines_and_sample(self) -> None:
        arguments = [
            "--seed",
            "9",
            "--steps",
            "6",
            "--log-every",
            "2",
            "--eval-every",
            "3",
            "--sample",
            "40",
            "--list-files",
        ]
        exports = {trainer: self.folder / f"{trainer}.safetensors" for trainer in ("cpp", "python")}
        cpp, cpp_output = self.train("cpp", *arguments, "--export", str(exports["cpp"]))
        pictures = self.folder / "new" / "pictures"
        python, output = self.train("python", *arguments, "--export", str(exports["python"]), "--plot", str(pictures))
        self.assertEqual(exact(python), exact(cpp))
        self.assertEqual(lines(output), lines(cpp_output))
        self.assertIn("3 files", output)
        self.assertIn("1 binary files left out", output)
        self.assertEqual(exports["python"].read_bytes(), exports["cpp"].read_bytes())
        for name in ("loss.png", "memory.png"):
            self.assert_picture(pictures / name)

    @tier.both
    def test_ranks_that_share_the_matrices_give_the_same_bits(self) -> None:
        """From the same initial weights. Four heads, for those that share sequences, too."""
        path = self.folder / "of shared.safetensors"
        torch.manual_seed(7)
        save_file({name: torch.randn(value.shape) / 8 for name, value in small_model().state_dict().items()}, path)
        arguments = ["--init", str(path), "--heads", "4", "--steps", "3", "--sample", "1", "--dtype", "bf16"]
        exports = {trainer: self.folder / f"{trainer} of shared.safetensors" for trainer in ("cpp", "python")}
        meshes = (("tp=2", 2), ("sp=2", 2), ("dp=2,tp=2", 4), ("sp=2,tp=2", 4))
        for mesh, ranks in tier.rows(meshes, meshes[:1]):
            runs = {
                trainer: self.train(trainer, *arguments, "--mesh", mesh, "--export", str(export), ranks=ranks)
                for trainer, export in exports.items()
            }
            with self.subTest(mesh):
                self.assertEqual(exact(runs["python"][0]), exact(runs["cpp"][0]))
                self.assertEqual(lines(runs["python"][1]), lines(runs["cpp"][1]))
                self.assertEqual(exports["python"].read_bytes(), exports["cpp"].read_bytes())

    @tier.long
    def test_stages_are_compared_and_drawn(self) -> None:
        records = [self.folder / f"stage{stage}" for stage in range(4)]
        for stage, path in enumerate(records):
            done = self.start(
                "cpp", 2, *self.arguments, "--zero-stage", str(stage), "--steps", "2", "--json", str(path)
            )
            self.assertEqual(done.returncode, 0, done.stderr)
        picture = self.folder / "stages.png"
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "compare-stages", "--plot", picture, *records],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("the same, bit for bit", done.stdout)
        self.assert_picture(picture)

    # --- make train -------------------------------------------------------------------------------------------------

    def train_main(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What `make train` runs, small: a text of which a little model learns more than pairs of bytes tell."""
        folder = self.folder / "sentences"
        folder.mkdir(exist_ok=True)
        (folder / "sentences.py").write_text(
            "the cat that sat on the mat sees a rat and the rat sees that the cat is fat\n" * 80
        )
        if "--pictures" not in arguments:
            arguments = ("--pictures", str(self.folder / "of train"), *arguments)
        own = arguments.index("--")
        common = [
            "--data",
            str(folder),
            "--layers",
            "1",
            "--d-model",
            "32",
            "--heads",
            "2",
            "--seq",
            "32",
            "--batch",
            "4",
            "--lr",
            "1e-2",
        ]
        package = pathlib.Path(zeroth.__file__).parents[1]
        return subprocess.run(
            [ROOT / "tools" / "train-main", *arguments[:own], *common, *arguments[own:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=job.TIME_LIMIT_S,
            cwd=self.folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "ZEROTH_PYTHON": forked.program(),
                "ZEROTH_PYTHON_DIR": str(package),
                "ZEROTH_BIN_DIR": str(pathlib.Path(job.RUN).parent),
            },
        )

    def check_stages(self, output: str) -> None:
        """The table: planned bytes are the measured ones, wire bytes those of the formula, stage 0 needs most, one
        loss."""
        rows = [line.split() for line in output.splitlines() if re.match(r" +ZeRO-\d ", line)]
        self.assertEqual([row[0] for row in rows], [f"ZeRO-{stage}" for stage in range(4)], output)
        for row in rows:
            self.assertEqual((row[1], row[4]), (row[2], row[5]), row)
        planned = [int(row[1].replace(",", "")) for row in rows]
        self.assertGreater(planned[0], max(planned[1:]))
        self.assertEqual(len({row[-1] for row in rows}), 1, output)
        self.assertIn("Every one of 12 losses and gradient norms is the same, bit for bit, at all stages.", output)

    def test_make_train_on_a_small_text_in_cpp(self) -> None:
        pictures = self.folder / "of train in cpp"
        done = self.train_main(
            "--cpp", "--pictures", str(pictures), "--", "--steps", "120", "--eval-every", "40", "--sample", "20"
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.check_stages(done.stdout)
        self.assertIn("step-00000120", {path.name for path in (pictures / "main-checkpoints").iterdir()})
        self.assertIn(f"--checkpoints {pictures}/main-checkpoints --resume auto", done.stdout)

    @tier.long
    def test_make_train_on_a_small_text(self) -> None:
        pictures = self.folder / "of train in Python"
        done = self.train_main(
            "--pictures", str(pictures), "--", "--steps", "120", "--eval-every", "40", "--sample", "20"
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(
            done.stdout,
            r"ZeRO-3: validation loss 0\.\d+ nats/byte after 120 steps; the bigram entropy \d\.\d+ was passed by step \d+",  # noqa: E501
        )
        self.check_stages(done.stdout)
        drawn = {path for path in pictures.iterdir() if path.is_file()}
        self.assertEqual({path.name for path in drawn}, {"loss.png", "memory.png", "stages.png"})
        for path in drawn:
            self.assert_picture(path)

    @tier.long
    def test_mpirun_starts_the_ranks_of_make_train(self) -> None:
        for trainer in (("--cpp",), ("--pictures", str(self.folder / "under mpirun"))):
            with self.subTest(trainer):
                done = self.train_main(
                    *trainer, "--launcher", "mpirun", "--", "--steps", "120", "--eval-every", "40", "--sample", "0"
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("OMPI_COMM_WORLD_RANK", done.stdout + done.stderr)
                self.check_stages(done.stdout)
        done = self.train_main("--launcher", "srun", "--")
        self.assertEqual(
            (done.returncode, done.stderr), (64, 'train-main: error: --launcher is zeroth-run or mpirun, not "srun"\n')
        )

    def test_make_train_fails_where_nothing_is_learnt(self) -> None:
        done = self.train_main("--cpp", "--", "--steps", "1", "--sample", "0")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(
            done.stderr,
            r"compare-stages: the validation loss \d\.\d+ is not below the bigram entropy \d\.\d+ of the held-out text",
        )
        self.assertNotIn("bit for bit", done.stdout)

    def test_the_job_of_make_train_says_what_it_takes(self) -> None:
        done = subprocess.run([ROOT / "tools" / "train-main", "--help"], capture_output=True, text=True, check=True)
        for name in (
            "--cpp",
            "--launcher zeroth-run|mpirun",
            "--pictures FOLDER",
            "COMMON... --",
            "ARGUMENTS",
            "ZEROTH_PYTHON",
        ):
            self.assertIn(name, done.stdout)

    # --- arguments --------------------------------------------------------------------------------------------------

    def test_the_arguments_are_those_of_the_twin(self) -> None:
        cpp, python = (self.start(trainer, ranks, "--help") for trainer, ranks in (("cpp", 0), ("python", 2)))
        self.assertEqual((cpp.returncode, python.returncode), (0, 0), python.stderr)
        names = [set(re.findall(r"--[a-z][a-z-]+", done.stdout)) for done in (cpp, python)]
        self.assertEqual(names[1] - ONLY_IN_PYTHON, names[0])
        self.assertTrue(ONLY_IN_PYTHON <= names[1])
        self.assertEqual(python.stdout.count("--zero-stage"), 1, "rank 0 alone speaks")

    @tier.both
    def test_bad_input_ends_every_rank_with_its_code(self) -> None:
        config = self.folder / "misspelt.json"
        config.write_text('{\n"gradient_cliping": 1.0\n}')
        good = self.arguments
        cases: list[tuple[int, str, list[str]]] = [
            (64, "USAGE", []),
            (64, "USAGE", [*good, "--layer", "2"]),
            (74, "IO", ["--data", str(self.folder / "missing")]),
            (64, "USAGE", [*good, "--seq", "100000"]),
            (74, "IO", [*good, "--json", str(self.folder / "no" / "where")]),
            (78, "CONFIG", [*good, "--config", str(config)]),
        ]
        for code, slug, arguments in tier.rows(cases, cases[3:]):
            for trainer in ("cpp", "python"):
                with self.subTest(trainer=trainer, arguments=arguments[len(good) :]):
                    done = self.start(trainer, 1, *arguments)
                    self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                    self.assertRegex(done.stderr, rf"\[0\] ZEROTH ERROR \[{slug}\] rank=0/1: ")
                    self.assertNotIn("Traceback", done.stderr)
                    if slug == "CONFIG":
                        self.assertRegex(done.stderr, r"misspelt\.json:2.*gradient_clipping")

    def test_a_bare_rank_without_its_job_is_refused(self) -> None:
        done = self.start("python", 0, RANK="3", WORLD_SIZE="2")
        self.assertEqual(done.returncode, 77)
        self.assertIn("ZEROTH ERROR [ENVIRONMENT] rank=?/?: ", done.stderr)

    def test_ranks_with_different_text_stop(self) -> None:
        other = self.folder / "other"
        other.mkdir()
        (other / "b.txt").write_text(text(9, 6000))
        script = (
            f'import os, sys; rank = os.environ["RANK"]; data = [{str(self.text)!r}, {str(other)!r}][int(rank)]; '
            f'sys.argv[:1] = [{str(TRAIN)!r}, "--data", data]; sys.path.insert(0, {str(EXAMPLE)!r}); '
            f'import runpy; runpy.run_path({str(TRAIN)!r}, run_name="__main__")'
        )
        done = subprocess.run(
            [job.RUN, "-n", "2", *forked.python(), "-c", script, *MODEL],
            capture_output=True,
            text=True,
            timeout=job.TIME_LIMIT_S,
            check=False,
        )
        self.assertEqual(done.returncode, 76, done.stdout + done.stderr)
        for rank in (0, 1):
            self.assertRegex(done.stderr, rf"ZEROTH ERROR \[MISMATCH\] rank={rank}/2: the ranks differ in the text")

    # --- the bar ----------------------------------------------------------------------------------------------------

    @tier.both
    def test_a_bar_stands_for_the_progress_lines(self) -> None:
        shown_by = (("--bar", True), ("--no-bar", False))
        for flag, shown in tier.rows(shown_by, shown_by[:1]):
            done = self.start(
                "python", 0, *self.arguments, "--steps", "3", "--log-every", "1", "--eval-every", "2", flag
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual("3/3" in done.stdout and "100%" in done.stdout, shown, done.stdout)
            self.assertEqual("step 2/3  loss" in done.stdout, not shown)
            self.assertIn("step 2  validation loss", done.stdout)


def small_model() -> Gpt:
    return Gpt(ModelOptions(layers=2, d_model=32, heads=2, seq=SEQ, seed=1, dtype=torch.float32))


class InitialWeights(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "initial.safetensors"
        self.model = small_model()
        self.values = {name: value.clone() for name, value in self.model.state_dict().items()}

    def refusal(self) -> zeroth.Error:
        before = self.values["embedding"].clone()
        with self.assertRaises(zeroth.Error) as caught:
            weights.load_weights(self.model, self.path)
        self.assertTrue(torch.equal(self.model.embedding, before), "nothing is changed by a refusal")
        self.assertIn(str(self.path), caught.exception.which)
        return caught.exception

    def test_names_shapes_and_dtypes_are_checked_and_named(self) -> None:
        changed = dict(self.values)
        del changed["blocks.1.mlp.down.weight"]
        changed["lm_head.weight"] = torch.zeros(3)
        changed["last_norm.weight"] = torch.ones(7)
        changed["blocks.0.mlp_norm.weight"] = torch.ones(32, dtype=torch.int64)
        save_file(changed, self.path)
        error = self.refusal()
        self.assertEqual((error.code, error.exit_code), ("USAGE", 64))
        self.assertEqual(
            error.got,
            "missing: blocks.1.mlp.down.weight; not in the model: lm_head.weight; of another shape: last_norm.weight [7] instead of "  # noqa: E501
            "[32]; no floating-point numbers: blocks.0.mlp_norm.weight (torch.int64)",
        )

    def test_many_names_are_counted(self) -> None:
        save_file({"embedding": self.values["embedding"]}, self.path)
        self.assertRegex(self.refusal().got, r"^missing: (blocks[\w.]+, ){4}blocks[\w.]+ and 8 more$")

    def test_a_file_that_is_none_is_an_io_error(self) -> None:
        self.assertEqual(self.refusal().code, "IO")
        self.path.write_bytes(b"no weights")
        self.assertEqual(self.refusal().code, "IO")
        save_file(self.values, self.path)
        self.path.write_bytes(self.path.read_bytes()[:-1])
        self.assertEqual(self.refusal().code, "IO")

    def test_values_are_rounded_to_the_dtype_of_the_run(self) -> None:
        save_file({name: value.double() + 1 / 3 for name, value in self.values.items()}, self.path)
        self.model.to(torch.bfloat16)
        weights.load_weights(self.model, self.path)
        loaded = load_file(self.path)
        for name, parameter in self.model.named_parameters():
            self.assertTrue(torch.equal(parameter, loaded[name].to(torch.bfloat16)), name)

    def test_the_twin_refuses_the_same(self) -> None:
        save_file({**self.values, "lm_head.weight": torch.zeros(3)}, self.path)
        done = subprocess.run(
            [CPP, "--data", str(EXAMPLE), *MODEL, "--init", str(self.path)], capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 64, done.stderr)
        self.assertIn(f"got: {self.refusal().got}; ", done.stderr)


class Parts(unittest.TestCase):
    def parse(self, *arguments: str) -> options.Options:
        return options.parse_command_line(["--data", "text", *arguments])

    def test_arguments_that_cannot_be_meant_are_named(self) -> None:
        for arguments, named in (
            (["--layers", "0"], "--layers.*from 1 to"),
            (["--layers", "three"], "--layers.*'three'"),
            (["--seed", "-1"], "--seed"),
            (["--lr", "-1"], "--lr"),
            (["--lr", "nan"], "--lr.*'nan'"),
            (["--dtype", "int8"], "--dtype.*int8"),
            (["--zero-stage", "4"], "--zero-stage"),
            (["--target", "low"], "--target.*low"),
            (["--heads", "3"], "--heads.*--d-model 256 --heads 3"),
            *((["--mesh", mesh], "a list of the axes pp, dp, ep, sp and tp.*--mesh") for mesh in MESHES_THAT_ARE_NONE),
            (["--eval-windows", "0", "--target", "bigram"], "--eval-windows"),
            (["--sample", "3", "--prompt", ""], "--prompt"),
            (["stray"], "stray"),
        ):
            with self.subTest(arguments=arguments), self.assertRaisesRegex(zeroth.Error, named) as caught:
                self.parse(*arguments)
            self.assertEqual(caught.exception.exit_code, 64)

    def test_stages_that_would_share_sequences_are_refused(self) -> None:
        wanted = settings.make_settings(self.parse("--mesh", "pp=2,sp=2"), 4)
        with self.assertRaisesRegex(zeroth.Error, "share no sequences here.*expected: sp=1 beside pp; got: sp=2"):
            make_stages(small_model(), wanted, zeroth.World.from_environment())

    def test_the_twin_refuses_the_same_meshes(self) -> None:
        for mesh in ("", "tp=2,tp=2"):
            with self.subTest(mesh), self.assertRaises(zeroth.Error) as caught:
                self.parse("--mesh", mesh)
            done = subprocess.run([CPP, "--data", "text", "--mesh", mesh], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertIn(f"{caught.exception.message}; where", done.stderr)

    def test_arguments_derive_what_is_not_said(self) -> None:
        self.assertEqual(self.parse("--d-model", "320").heads, 5)
        parsed = self.parse(
            "--steps", "5", "--suffix", ".py", ".pyi", "--steps", "6", "--suffix", ".h", "--target-loss", "2.5"
        )
        self.assertEqual(
            (parsed.steps, parsed.suffix, parsed.target_loss, parsed.eval_every), (6, [".py", ".pyi", ".h"], 2.5, 10)
        )

    def test_a_file_an_argument_and_a_default_are_merged(self) -> None:
        def batch(document: str, world_size: int, *arguments: str) -> tuple[int, int, int]:
            path.write_text(document)
            merged = settings.make_settings(self.parse("--config", str(path), *arguments), world_size)
            return merged.batch, merged.micro_batch, merged.accumulate

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "zero.json"
            self.assertEqual(batch('{"train_batch_size": 24}', 3), (24, 8, 1))
            self.assertEqual(batch('{"train_batch_size": 24, "gradient_accumulation_steps": 4}', 3), (24, 2, 4))
            self.assertEqual(batch('{"train_batch_size": "auto", "gradient_accumulation_steps": 5}', 3), (120, 8, 5))
            self.assertEqual(batch('{"train_batch_size": 24}', 3, "--accumulate", "2"), (48, 8, 2))
            # Ranks that share the matrices have one batch, with DeepSpeed's name for the size, too.
            self.assertEqual(batch("{}", 6, "--mesh", "tp=2"), (24, 8, 1))
            self.assertEqual(batch('{"train_batch_size": 24}', 6, "--mesh", "dp=3,tp=2"), (24, 8, 1))
            self.assertEqual(
                batch('{"tensor_parallel": {"autotp_size": 2}, "train_batch_size": "auto"}', 6), (24, 8, 1)
            )
            self.assertEqual(batch('{"zeroth": {"mesh": {"sp": 2}}}', 8, "--mesh", "tp=2"), (16, 8, 1))
            with self.assertRaisesRegex(zeroth.Error, "the mesh does not fit the number of ranks"):
                batch("{}", 4, "--mesh", "tp=3")
            path.write_text(
                '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "optimizer": '
                '{"type": "SGD", "params": {"lr": "auto"}}}'
            )
            merged = settings.make_settings(self.parse("--config", str(path), "--zero-stage", "2"), 1)
            self.assertEqual(merged.notes, [f"--zero-stage: /zero_optimization/stage = 2 replaces 1 of {path}"])
            self.assertEqual((merged.dtype, merged.config.zero_stage), ("bf16", 2))
            self.assertEqual(json.loads(merged.config.to_json())["optimizer"]["params"]["lr"], 1e-3)
            for wrong in ("", "[1]", '{"a": ', '{"bf16": {}, "bf16": {}}', '{"optimizer": 3}'):
                path.write_text(wrong)
                with self.subTest(wrong=wrong), self.assertRaisesRegex(zeroth.ConfigError, r"zero\.json"):
                    settings.make_settings(self.parse("--config", str(path), "--lr", "1"), 1)

    def test_numbers_are_written_as_in_c(self) -> None:
        self.assertEqual(
            [report.hex_float(value) for value in (0.0, 1.0, -2.5, 5e-324, float("inf"))],
            ["0x0p+0", "0x1p+0", "-0x1.4p+1", "0x0.0000000000001p-1022", "inf"],
        )
        self.assertEqual(
            [data.format_bytes(value) for value in (0, 1023, 1536, 12 << 20, (1 << 20) - 1)],
            ["0 B", "1023 B", "1.50 KiB", "12.0 MiB", "1.00 MiB"],
        )

    def test_an_error_that_torch_passed_on_keeps_its_code(self) -> None:
        passed_on = RuntimeError("[PEER_LOST] rank 1 died; hint: look there\nException raised from step")
        self.assertEqual(
            errors.error_line(passed_on, "rank=0/2"),
            ("ZEROTH ERROR [PEER_LOST] rank=0/2: rank 1 died; hint: look there\n", 76),
        )
        self.assertIsNone(errors.error_line(RuntimeError("[enforce fail] somewhere"), "rank=0/2"))


if __name__ == "__main__":
    tier.main()
