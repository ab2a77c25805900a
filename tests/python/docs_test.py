"""Python blocks of README.md and docs/ run, in their order; JSON blocks train; commands of shell blocks are known to
what they call; the examples run. tests/docs/check_docs.py says which test takes the other blocks."""

from __future__ import annotations

import ast
import difflib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import forked
import job
import torch

import zeroth

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/docs"))

from blocks import all_blocks  # noqa: E402
from check_docs import COMMANDS  # noqa: E402

BLOCKS = all_blocks(ROOT)
BUILD = os.environ["ZEROTH_BUILD"]
"""build tree, from CMake: in the place of build/core"""
RUNS = {
    "make train": "--dry-run",
    "make test": "--dry-run",
    "make test-quick": "--dry-run",
    "make fuzz": "--dry-run",
    "cmake --preset core": "-N",
    "cmake --build build/core -j 2": "-- -n",
    "build/core/tests/conformance/comm_chaos --gtest_filter='Chaos.*'": "--gtest_list_tests",
    "benchmarks/peers/peers.py": "--list",
    "benchmarks/peers/peers.py --cells peers-25m-2-ranks": "--list",
    "benchmarks/run.py --only 'peers-*'": "--list",
    "benchmarks/peers/table.py --page docs/peers.md": "--check",
}
"""what makes a command say what it would do, and not do it: they take minutes, and some are what runs this test
(gpt_test.py runs the job of `make train` on a small text)"""


class DocsTest(unittest.TestCase):
    def test_python_blocks(self) -> None:
        pages = dict.fromkeys(block.page for block in BLOCKS if block.language == "python")
        self.assertIn("docs/python.md", pages)
        for page in pages:
            with self.subTest(page=page), tempfile.TemporaryDirectory() as folder:
                program = "\n".join(block.text for block in BLOCKS if (block.page, block.language) == (page, "python"))
                done = subprocess.run(
                    [*forked.python(), "-c", program],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=False,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_json_blocks(self) -> None:
        blocks = [
            block for block in BLOCKS if block.language == "json" and "zeroth_calls" not in block.text
        ]  # tables of calls: mpi_test.py
        self.assertTrue(blocks)
        for block in blocks:
            with self.subTest(file=block.file):
                dtype = torch.bfloat16 if "bf16" in json.loads(block.text) else torch.float32
                model = torch.nn.Linear(2, 2, dtype=dtype)
                engine = zeroth.Engine(model, zeroth.Config.from_json(block.text, block.file), log_level="off")
                for _ in range(engine.config.gradient_accumulation_steps or 1):
                    engine.backward(engine(torch.ones(4, 2, dtype=dtype)).sum())
                    result = engine.step()
                self.assertTrue(result.committed, result.reason)
                engine.close()

    def test_commands(self) -> None:
        self.assertEqual(
            set(RUNS),
            {command for command, (test, _) in COMMANDS.items() if ROOT / test == pathlib.Path(__file__).resolve()},
        )
        environment = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        }
        for command, only_say in RUNS.items():
            with self.subTest(command=command):
                done = subprocess.run(
                    ["bash", "-c", f"{command} {only_say}".replace("build/core", BUILD)],
                    cwd=ROOT,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertTrue(done.stdout or "--check" in only_say)

    def test_the_example_that_is_killed_goes_on_with_the_same_losses(self) -> None:
        def run(ranks: int, *arguments: str) -> tuple[int, list[str]]:
            done = subprocess.run(
                [job.RUN, "-n", str(ranks), *forked.python(), str(ROOT / "examples/resume/train.py"), *arguments],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            return done.returncode, [line for line in done.stdout.splitlines() if "loss" in line or "goes on" in line]

        with tempfile.TemporaryDirectory() as scratch:
            _, whole = run(2, f"{scratch}/whole")
            self.assertEqual(len(whole), 8)
            code, _ = run(2, f"{scratch}/cut", "--stop", "15")
            self.assertEqual(code, 128 + 9)
            code, rest = run(2, f"{scratch}/cut")
            self.assertEqual((code, rest[1:]), (0, whole[2:]))
            self.assertIn("step-00000010, written by 2 ranks", rest[0])
            code, elsewhere = run(3, f"{scratch}/cut", "--stage", "1", "--steps", "45")
            self.assertEqual((code, len(elsewhere)), (0, 2))

    def test_the_loop_and_its_twin_differ_in_few_lines_and_in_no_digit(self) -> None:
        folder = ROOT / "examples/torch_loop"
        plain = subprocess.run(
            [*forked.python(), str(folder / "plain.py")], capture_output=True, text=True, timeout=120, check=True
        )
        for ranks in (1, 2):  # the same data on every rank, so the mean is that of one
            done = subprocess.run(
                [job.RUN, "-n", str(ranks), *forked.python(), str(folder / "with_zeroth.py")],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(plain.stdout.strip(), done.stdout)
        # Statements, one a line, however a formatter breaks them; the first is the docstring.
        bodies = [
            [ast.unparse(statement) for statement in ast.parse((folder / name).read_text()).body[1:]]
            for name in ("plain.py", "with_zeroth.py")
        ]
        bodies = [[line for text in body for line in text.splitlines()] for body in bodies]
        changed = [line for line in difflib.ndiff(*bodies) if line[0] in "+-" and line[1:].strip()]
        self.assertEqual(len(changed), 4, changed)  # import, engine instead of optimizer, no zero_grad


if __name__ == "__main__":
    unittest.main(verbosity=2)
