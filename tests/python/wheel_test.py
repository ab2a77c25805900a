"""pip install --no-build-isolation: a package of our own files that trains outside the tree; and what the plain form
says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import tier

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["ZEROTH_BUILD"])
"""build tree, from CMake: pip builds in a folder below it"""
TRAIN = """
import torch, zeroth
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
engine = zeroth.Engine(model, {"zero_optimization": {"stage": 3}}, log_level="off")
engine.backward(engine(torch.ones(2, 4)).sum())
assert engine.step().committed
print("rank", engine.rank, "of", engine.world_size, zeroth.__file__)
"""


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


class WheelTest(unittest.TestCase):
    @tier.long
    def test_the_installed_package_trains(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "site"
            # Warnings as errors, and CXX from CMake, as in the build tree: then its compiler cache has everything.
            settings = ["-C", f"build-dir={BUILD}/wheel", "-C", "cmake.define.ZEROTH_WERROR=ON"]
            where = ["--no-deps", "--no-index", "--target", str(target)]
            done = pip("install", "--no-build-isolation", *where, *settings, str(SOURCE))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            files = sorted(
                path.relative_to(target).as_posix()
                for path in target.rglob("*")
                if path.is_file() and "__pycache__" not in path.parts and ".dist-info" not in path.as_posix()
            )
            libraries = [name for name in files if name.endswith(".so")]
            self.assertEqual(
                sorted(name.split(".")[0] for name in libraries),
                ["zeroth/_C", "zeroth/libzeroth_mpi"],
                "only our own code is in the wheel",
            )
            self.assertEqual(
                {name for name in files if name not in libraries},
                {
                    "bin/zeroth",
                    "bin/zeroth-bench",
                    "bin/zeroth-run",
                    "bin/zeroth-trace",
                    "zeroth/_build.py",
                    *(
                        path.relative_to(SOURCE / "python").as_posix()
                        for path in (SOURCE / "python/zeroth").rglob("*")
                        if path.is_file() and "__pycache__" not in path.parts
                    ),
                },
            )
            dynamic = subprocess.run(
                ["readelf", "-d", str(target / libraries[0])], capture_output=True, text=True, check=True
            ).stdout
            self.assertNotRegex(dynamic, "RPATH|RUNPATH")
            environment = {**os.environ, "PYTHONPATH": str(target), "PATH": "/nowhere"}  # no compiler is looked for
            done = subprocess.run(
                [target / "bin/zeroth-run", "-n", "2", sys.executable, "-c", TRAIN],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            examined = subprocess.run(
                [target / "bin/zeroth", "doctor", "--disk-mib", "1", "--slow-below", "0.001", "--min-free-gib", "0"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(examined.returncode, 0, examined.stdout + examined.stderr)
            self.assertIn("all well", examined.stdout)
            helped = subprocess.run(
                [target / "bin/zeroth", "ckpt", "--help"],
                cwd=folder,
                env={**environment, "ZEROTH_PYTHON": sys.executable},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            self.assertEqual(helped.returncode, 0, helped.stdout + helped.stderr)
            self.assertIn("average", helped.stdout)
            for rank in (0, 1):
                self.assertIn(f"[{rank}] rank {rank} of 2 {target}/zeroth/__init__.py", done.stdout)

    def test_a_build_without_torch_says_which_line_to_type(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            bare = pathlib.Path(folder) / "python"
            bare.write_text(
                f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n'
            )  # no site packages, as in pip's own environment
            bare.chmod(0o755)
            done = subprocess.run(
                [
                    "cmake",
                    "-S",
                    str(SOURCE),
                    "-B",
                    f"{folder}/build",
                    "-G",
                    "Ninja",
                    "-DSKBUILD=2",
                    f"-DPython_EXECUTABLE={bare}",
                    "-DZEROTH_TORCH=ON",
                ],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("pip install --no-build-isolation .", done.stderr)


if __name__ == "__main__":
    tier.main()
