#!/usr/bin/env python3
"""The largest GPT that trains in a given memory with everything in files, beside the largest with everything in memory:
found by the plan, then trained for some steps, planned beside measured.

  largest.py FOLDER [--memory GIB] [--disk GIB] [--ranks 2] [--width 1024] [--steps 3] [--json FILE] [--build DIR]

`--memory`: most that the engines of all ranks may plan together (zeroth.memory_limit_bytes). `--disk`: most bytes of
all ranks in FOLDER. In files: parameters, the optimizer's states, and inputs of checkpoints, at ZeRO-3, in float32.
What torch needs beside is in no plan: the PSS of the ranks, sampled from outside, has it, and the libraries' code.
Plain Python 3.
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
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "support"))
from processes import children, pss  # noqa: E402
from record import Record, program  # noqa: E402

SAMPLE_SECONDS = 0.25
GIB = 1 << 30


def run(where: str, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The report of the ranks, with "pss_building" and "pss_training": the peaks of their sum."""
    report = pathlib.Path(folder) / f"{where}.json"
    command: list[Any] = [program(arguments.build, "zeroth-run"), "-q", "--no-prefix", "-n", arguments.ranks]
    command += [arguments.python, HERE / "largest_rank.py", where, "--folder", folder, "--report", report]
    command += ["--memory", int(arguments.memory * GIB), "--disk", int(arguments.disk * GIB)]
    command += ["--width", arguments.width, "--seq", arguments.seq, "--steps", arguments.steps]
    paths = [str(arguments.build / "python"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    peaks = {"pss_building": 0, "pss_training": 0}
    with subprocess.Popen([str(word) for word in command], env=environment, stdout=sys.stderr) as process:
        while process.poll() is None:
            phase = "pss_training" if report.with_suffix(".trains").exists() else "pss_building"
            peaks[phase] = max(peaks[phase], sum(map(pss, children(process.pid))))
            time.sleep(SAMPLE_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"{where}: the ranks failed with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found | peaks


def add_rows(record: Record, where: str, found: dict[str, Any]) -> None:
    def add(name: str, unit: str, values: list[float], better: str = "none") -> None:
        record.add(f"{where}: {name}", unit, values, better)

    add("parameters", "millions", [found["parameters"] / 1e6], "higher")
    add("layers", "layers", [float(found["layers"])], "higher")
    for tier in ("memory", "files"):
        for word in ("planned", "measured"):
            add(f"{word} {tier}, all ranks", "MiB", [found[f"{word}_{tier}"] / 2**20], "lower")
    add("activations in files, all ranks", "MiB", [found["activation_files"] / 2**20])
    for name, key in (("peak PSS while it is built", "pss_building"), ("peak PSS of the steps", "pss_training")):
        add(f"{name}, all ranks", "MiB", [found[key] / 2**20], "lower")
    add("PSS after the steps, all ranks", "MiB", [found["pss_after"] / 2**20], "lower")
    add("search by the plan", "s", [found["search_seconds"]], "lower")
    add("time until the first step", "s", [found["build_seconds"]], "lower")
    later = found["steps"][1:]  # the first one reads nothing, and finds its order
    add("step", "s", [step["seconds"] for step in later], "lower")
    for word in ("read", "written"):
        add(f"{word} in a step, all ranks", "MB", [step[word] / 1e6 for step in later])
    both = [(step["read"] + step["written"]) / step["seconds"] / 1e6 for step in later]
    add("bandwidth over the step, all ranks", "MB/s", both, "higher")
    beyond = found["measured_files"] - found["planned_files"]  # what the file system needs to find its blocks
    if found["planned_memory"] != found["measured_memory"] or not 0 <= beyond <= found["planned_files"] // 1000:
        record.notes.append(f"{where}: PLANNED AND MEASURED BYTES DIFFER")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--memory", type=float, default=4.0)
    parser.add_argument("--disk", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    venv = ROOT / "build/venv/bin/python"
    parser.add_argument("--python", type=pathlib.Path, default=venv if venv.exists() else pathlib.Path(sys.executable))
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps: at least 2, for the first one is not counted")
    free = os.statvfs(arguments.folder)
    if free.f_bavail * free.f_frsize < arguments.disk * GIB:
        parser.error(f"--disk: {arguments.folder} has {free.f_bavail * free.f_frsize / GIB:.1f} GiB left")
    record = Record(benchmark="offload/largest")
    record.settings = {
        "memory_gib": arguments.memory,
        "disk_gib": arguments.disk,
        "ranks": arguments.ranks,
        "width": arguments.width,
        "seq": arguments.seq,
        "steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {where: run(where, arguments, folder) for where in ("resident", "files")}
    for where, one in found.items():
        add_rows(record, where, one)
    ratio = found["files"]["parameters"] / found["resident"]["parameters"]
    record.add("files / resident: parameters", "ratio", [ratio], "higher")
    record.count_foreign()
    record.write(arguments.json)


if __name__ == "__main__":
    main()
