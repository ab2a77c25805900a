"""Virtual environments with one torch each, below the build tree: relative paths there are in the compiler cache."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "python" / "backend"))
from zeroth_backend import NEWEST, OLDEST  # noqa: E402

BUILD = pathlib.Path(os.environ["ZEROTH_BUILD"])
"""build tree, from CMake"""
REQUIREMENTS = SOURCE / "tools" / "requirements.txt"
NETWORK_S = 1_800


def torch_of_this_build() -> str:
    from zeroth import _build

    return _build.TORCH_VERSION.split("+")[0]


def other_torch() -> str:
    """The one of the two that this build tree was not built with."""
    return OLDEST if torch_of_this_build() == NEWEST else NEWEST


def run(
    command: Sequence[str | pathlib.Path], *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """With the output of both kinds in `stdout`; from a folder where no source is imported by accident."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=BUILD,
        env=None if environment is None else dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def require(done: subprocess.CompletedProcess[str]) -> str:
    """Its output; raises with it if the command failed."""
    if done.returncode != 0:
        raise AssertionError(f"{done.args} ended with {done.returncode}:\n{done.stdout[-20_000:]}")
    return done.stdout


def own_environment() -> dict[str, str]:
    """Without what CMake gives to tests of this build tree: another torch is to be found."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ZEROTH_TIER")}


def pip(python: pathlib.Path, *words: str | pathlib.Path, timeout_s: float = NETWORK_S) -> str:
    command = [python, "-m", "pip", "--disable-pip-version-check", *words]
    return require(run(command, timeout_s=timeout_s, environment=own_environment()))


@contextlib.contextmanager
def fresh(name: str, packages: Sequence[str]) -> Iterator[pathlib.Path]:
    """The Python of a new environment with these packages, which is removed at the end."""
    folder = BUILD / "environments" / name
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    try:
        require(run([sys.executable, "-m", "venv", folder], timeout_s=300))
        pip(python, "install", "--quiet", *packages)
        yield python
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def requirements_with(torch: str) -> list[str]:
    """Lines of tools/requirements.txt, but with this torch."""
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    return [re.sub(r"^torch==.*", f"torch=={torch}", line) for line in kept]
