"""pip install: a package of our own files that trains outside the tree, and requires the torch that it was built with.
The torch of an environment stays as it is."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import environments
import tier
import zeroth_backend  # environments has made it known
from environments import BUILD, SOURCE

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


def torch_of(folder: pathlib.Path, version: str) -> pathlib.Path:
    """What the backend reads of an installed torch."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n")
    return folder / "torch"


class BackendTest(unittest.TestCase):
    """What the build says before it compiles anything."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_nothing_is_missing_where_this_tree_was_built(self) -> None:
        self.assertEqual(zeroth_backend.missing(os.environ), [])

    def test_the_wheel_requires_the_torch_that_it_is_built_with(self) -> None:
        built = environments.torch_of_this_build()
        self.assertEqual(zeroth_backend.dynamic_metadata({}, {}), {"dependencies": [f"torch=={built}"]})
        with mock.patch.object(zeroth_backend, "torch_folder", lambda: torch_of(self.folder, "2.12.1+cpu")):
            self.assertEqual(zeroth_backend.dynamic_metadata({}, {}), {"dependencies": ["torch==2.12.1"]})

    def test_torch_is_found_though_pip_hides_it(self) -> None:
        """As in pip's own environment: no site packages on the path, and the interpreter of the user's."""
        site = torch_of(self.folder, "2.15.0").parent
        with (
            mock.patch("importlib.util.find_spec", lambda name: None),
            mock.patch("sysconfig.get_path", lambda name, scheme="": str(site)),
        ):
            self.assertEqual(zeroth_backend.torch_folder(), site / "torch")

    def test_all_that_is_missing_is_said_at_once(self) -> None:
        compiler = self.folder / "no-headers"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
        with (
            mock.patch("importlib.util.find_spec", lambda name: None),
            mock.patch("sysconfig.get_path", lambda name, scheme="": str(self.folder)),
            self.assertRaises(SystemExit) as caught,
        ):
            zeroth_backend.require_all({"CXX": str(compiler)})
        text = str(caught.exception)
        for part in ("torch in ", "pip install torch", "Python.h", "python3-dev", "scikit-build-core", "libspdlog-dev"):
            self.assertIn(part, text)

    def test_a_torch_that_is_too_old_is_refused(self) -> None:
        old = torch_of(self.folder, "2.10.2+cpu")
        with (
            mock.patch.object(zeroth_backend, "torch_folder", lambda: old),
            self.assertRaisesRegex(SystemExit, "torch 2.11 or newer: this is torch 2.10.2"),
        ):
            zeroth_backend.require_all(os.environ)


class WheelTest(unittest.TestCase):
    @tier.long
    def test_it_installs_beside_torch_alone(self) -> None:
        """In a new environment that has torch and nothing else, of each version. Pip leaves what is there."""
        for version in (environments.OLDEST, environments.NEWEST):
            with self.subTest(torch=version), environments.fresh(f"alone-{version}", [f"torch=={version}"]) as python:
                before = environments.pip(python, "freeze").splitlines()
                # A build folder below the build tree: the source tree stays as it is.
                settings = ["-C", f"build-dir={BUILD}/environments/build-{version}"]
                environments.pip(python, "install", *settings, SOURCE, timeout_s=3_000)
                after = environments.pip(python, "freeze").splitlines()
                self.assertEqual([line for line in after if not line.startswith("zeroth")], before)
                self.assertIn(f"torch=={version}", [line.split("+")[0] for line in after])
                shown = environments.pip(python, "check")
                self.assertIn("No broken requirements", shown)
                environment = {**environments.own_environment(), "PATH": "/nowhere"}
                done = environments.run(
                    [python.parent / "zeroth-run", "-n", "2", python, "-c", TRAIN],
                    timeout_s=300,
                    environment=environment,
                )
                self.assertIn("[1] rank 1 of 2", environments.require(done))

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
        self.assertIn("pip install .", done.stderr)


if __name__ == "__main__":
    tier.main()
