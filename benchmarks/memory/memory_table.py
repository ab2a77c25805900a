#!/usr/bin/env python3
"""Memory of the 25 M GPT at every ZeRO stage: planned, measured by tag, and the PSS of all ranks seen from outside.

  memory_table.py [--build DIR] [--ranks 2,4] [--json FILE]

Planned and measured bytes are those of rank 0, from the final record of zeroth-gpt. The PSS is sampled from
smaps_rollup of all ranks, which counts every shared page once; its peak also holds activations, torch's code and its
temporary gradients, so only the differences between stages speak of ZeRO. Sampling costs time: no speed is reported.
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

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from processes import children, pss  # noqa: E402
from record import Record, program  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 2**20


def run(stage: int, ranks: int, arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """The trainer's final record, with "pss_seen" (peak of the sum over ranks)."""
    records = folder / "records.json"
    records.unlink(missing_ok=True)
    command: list[Any] = [program(arguments.build, "zeroth-run"), "-n", ranks, program(arguments.build, "zeroth-gpt")]
    command += ["--data", arguments.data, "--suffix", ".py", "--layers", 8, "--d-model", 512]
    command += ["--seq", arguments.seq, "--batch", arguments.batch, "--steps", arguments.steps]
    command += ["--eval-windows", 1, "--zero-stage", stage, "--json", records]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    peak = 0
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            [str(word) for word in command], stdout=output, stderr=output, env=environment
        ) as process:
            while process.poll() is None:
                peak = max(peak, sum(pss(child) for child in children(process.pid)))
                time.sleep(arguments.interval)
        if process.returncode != 0:
            output.seek(0)
            sys.exit(f"stage {stage}, {ranks} ranks: the trainer failed\n{output.read()}")
    final: dict[str, Any] = json.loads(records.read_text(encoding="utf-8").splitlines()[-1])
    return final | {"pss_seen": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--seq", type=int, default=32, help="short, so that activations do not hide the rest")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between samples")
    parser.add_argument("--data", default=str(pathlib.Path(json.__file__).parent), help="folder with .py files")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    record = Record(benchmark="memory/stages")
    record.settings = {"model": "8 layers, d 512", "seq": arguments.seq, "micro_batch": arguments.batch}
    record.settings |= {"ranks": arguments.ranks, "stages": arguments.stages}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (int(word) for word in arguments.ranks.split(",")):
            states: list[str] = []
            finals: dict[int, dict[str, Any]] = {}
            for stage in (int(word) for word in arguments.stages.split(",")):
                final = finals[stage] = run(stage, ranks, arguments, pathlib.Path(folder))
                states = list(final["planned_bytes"])
                name = f"{ranks} ranks, stage {stage}"
                record.add(f"{name}: planned, rank 0", "MiB", [final["planned_bytes"]["total"] / MIB], "lower")
                record.add(f"{name}: measured, rank 0", "MiB", [final["measured_bytes"]["total"] / MIB], "lower")
                record.add(f"{name}: peak PSS, all ranks", "MiB", [final["pss_seen"] / MIB], "lower")
                record.add(f"{name}: wire, rank 0, a step", "MB", [wire(final) / 1e6], "lower")
                if final["planned_bytes"] != final["measured_bytes"]:
                    record.notes.append(f"{name}: PLANNED AND MEASURED BYTES DIFFER")
                if final["wire_bytes"] != final["wire_formula_bytes"]:
                    record.notes.append(f"{name}: WIRE BYTES DIFFER FROM THE FORMULA")
            print_states(ranks, states, finals)
    record.write(arguments.json)


def wire(final: dict[str, Any]) -> float:
    return float(sum(final["wire_bytes"].values()) / max(1, final["steps"]))


def print_states(ranks: int, states: list[str], finals: dict[int, dict[str, Any]]) -> None:
    """MiB of rank 0 by state and stage: planned / measured."""
    print(f"{ranks} ranks, MiB of rank 0, planned / measured")
    print(f"  {'':<24}" + "".join(f"{'stage ' + str(stage):>20}" for stage in finals))
    for state in states:
        cells = [
            (final["planned_bytes"][state] / MIB, final["measured_bytes"].get(state, 0) / MIB)
            for final in finals.values()
        ]
        if any(max(cell) > 0 for cell in cells):
            print(f"  {state:<24}" + "".join(f"{planned:>10.2f} /{measured:>8.2f}" for planned, measured in cells))


if __name__ == "__main__":
    main()
