#!/usr/bin/env python3
"""How long a C++ trainer takes from its launcher's start to the end of step 1, beyond the step's compute.

  startup_bench.py [--build DIR] [--rounds N] [--json FILE]

The end of step 1 is the moment when its progress line comes out of `zeroth-run`. Two figures for the compute are taken
off: step 1's own time as the trainer records it, and that of step 2, so that what only the first step pays (first touch
of memory, lazy initialisation) shows in the difference. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from record import Record, program  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]


def one_round(build: pathlib.Path, arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, float]:
    """Seconds: until step 1 was reported, of step 1, of step 2, until everything had ended."""
    records = folder / "records.json"
    records.unlink(missing_ok=True)
    command = [program(build, "zeroth-run"), "-n", str(arguments.ranks), program(build, "zeroth-gpt")]
    command += ["--data", arguments.data, "--suffix", ".py", "--layers", "8", "--d-model", "512", "--seq", "128"]
    command += ["--batch", "4", "--steps", "2", "--log-every", "1", "--eval-windows", "2", "--json", records]
    command += ["--zero-stage", str(arguments.zero_stage)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    first_step = 0.0
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        lines = []
        for line in process.stdout or []:
            lines.append(line)
            if "step 1/" in line and first_step == 0.0:
                first_step = time.perf_counter() - start
    whole = time.perf_counter() - start
    if process.returncode != 0 or first_step == 0.0:
        sys.exit("the trainer failed or never reported step 1:\n" + "".join(lines))
    steps = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    return {"first": first_step, "step1": steps[0]["seconds"], "step2": steps[1]["seconds"], "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero-stage", type=int, default=3)
    parser.add_argument("--data", default=str(pathlib.Path(json.__file__).parent), help="folder with .py files")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    record = Record(benchmark="step/startup")
    with tempfile.TemporaryDirectory() as folder:
        one_round(arguments.build, arguments, pathlib.Path(folder))  # fills the page cache
        rounds = [one_round(arguments.build, arguments, pathlib.Path(folder)) for _ in range(arguments.rounds)]
    record.settings = {
        "ranks": arguments.ranks,
        "zero_stage": arguments.zero_stage,
        "model": "8 layers, d 512, seq 128, micro-batch 4",
    }
    record.add("start to end of step 1", "s", [r["first"] for r in rounds], "lower")
    record.add("beyond step 1's own time", "s", [r["first"] - r["step1"] for r in rounds], "lower", bar=0.5)
    record.add("beyond the time of step 2", "s", [r["first"] - r["step2"] for r in rounds], "lower")
    record.add("step 1", "s", [r["step1"] for r in rounds])
    record.add("step 2", "s", [r["step2"] for r in rounds])
    record.add("start to exit, with a validation", "s", [r["whole"] for r in rounds], "lower")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
