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
import sys
from deepspeed.accelerator import get_accelerator
for name in sys.argv[1:]:
    get_accelerator().create_op_builder(name).load()
"""
OFFLOAD_OPERATORS = ("CPUAdamBuilder", "AsyncIOBuilder")
"""what DeepSpeed compiles when states are offloaded; the second one wants libaio.h (Debian: libaio-dev)"""


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
    command = [python, "-c", BUILD_OPERATOR, "ShareMemCommBuilder"]
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
    return time.monotonic() - start if done.returncode == 0 else 0.0


def compile_for_offload(places: Places) -> dict[str, str]:
    """DeepSpeed's operators of OFFLOAD_OPERATORS, once, for some minutes: otherwise the first job would do it, one rank
    waiting for the other. Returns why, for each that cannot be compiled."""
    failures = {}
    for name in OFFLOAD_OPERATORS:
        print(f"compiling DeepSpeed's {name}", file=sys.stderr, flush=True)
        done = subprocess.run(
            [places.python, "-c", BUILD_OPERATOR, name],
            env=places.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            failures[name] = said[-1][:300] if said else f"exit code {done.returncode}"
    return failures
