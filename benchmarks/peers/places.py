"""Where programs are, and the virtual environment of the peers. Plain Python 3."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

from record import program

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build/peers-venv"
REQUIREMENTS = pathlib.Path(__file__).resolve().parent / "requirements.txt"
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "TORCH_EXTENSIONS_DIR": str(VENV / "extensions")}
BUILD_OPERATOR = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()
"""


@dataclasses.dataclass(kw_only=True, frozen=True)
class Places:
    build: pathlib.Path
    """a build with zeroth-run and the Python package"""
    python: pathlib.Path
    """runs the ranks"""
    operator_seconds: float
    """DeepSpeed's compilation of its one operator when it was installed; 0: there is no DeepSpeed"""

    @property
    def launcher(self) -> pathlib.Path:
        return program(self.build, "zeroth-run")

    def environment(self) -> dict[str, str]:
        """Of every rank. LOCAL_SIZE is not set: DeepSpeed would write 66 MiB a rank to /dev/shm for an operation that
        ZeRO never calls, and leave them there."""
        inherited = {name: value for name, value in os.environ.items() if name != "LOCAL_SIZE"}
        paths = [str(self.build / "python"), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
        ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return inherited | DEEPSPEED | ours


def find_places(build: pathlib.Path, base: pathlib.Path) -> Places:
    """With the packages of `base`, a Python that has torch, and those of requirements.txt, which are installed if they
    are not there yet. Where that fails the contestants that need them will fail, and be reported so."""
    stamp = VENV / "installed.json"
    wanted = [str(base), REQUIREMENTS.read_text(encoding="utf-8")]
    installed = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
    if installed.get("wanted") != wanted:
        print(f"installing the peers into {VENV.relative_to(ROOT)}", file=sys.stderr, flush=True)
        installed = {"wanted": wanted, "operator_seconds": _install(base)}
        if installed["operator_seconds"] > 0:
            stamp.write_text(json.dumps(installed), encoding="utf-8")
    for lock in VENV.glob("extensions/*/lock"):
        lock.unlink()  # of a compilation that was interrupted: everybody would wait for its end
    return Places(build=build, python=VENV / "bin/python", operator_seconds=float(installed["operator_seconds"]))


def _install(base: pathlib.Path) -> float:
    """Seconds that the first start of DeepSpeed would have compiled; 0 if it cannot be installed."""
    subprocess.run([base, "-m", "venv", "--clear", VENV], check=True)
    folders = subprocess.run(
        [base, "-c", "import site; print(*site.getsitepackages(), sep='\\n')"],
        check=True,
        capture_output=True,
        text=True,
    )
    (own,) = (VENV / "lib").glob("python3*/site-packages")
    (own / "base.pth").write_text(folders.stdout, encoding="utf-8")
    environment = os.environ | DEEPSPEED
    python = VENV / "bin/python"
    pip: list[str | pathlib.Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-r",
        REQUIREMENTS,
    ]
    if subprocess.run(pip, env=environment, check=False).returncode != 0:
        return 0.0
    start = time.monotonic()
    done = subprocess.run([python, "-c", BUILD_OPERATOR], env=environment, check=False, stdout=subprocess.DEVNULL)
    return time.monotonic() - start if done.returncode == 0 else 0.0
