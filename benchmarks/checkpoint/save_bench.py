#!/usr/bin/env python3
"""How long a checkpoint takes, beside what disk and memory can, torch.save and torch's distributed checkpoints (DCP).

  save_bench.py [--build DIR] [--python PYTHON] [--ranks N] [--size 382|2016] [--rounds N] [--steps N] [--json FILE]

Everything is measured in the same ranks, in turns, at stage 3 with AdamW in float32: 12 bytes a parameter. A sample is
the time of the slowest rank. Write limits are of files that are reserved, written with O_DIRECT in blocks of 8 MiB and
synced, one a rank. "behind": save(async_=True), of which the stall is the time of the call. Plain Python 3; the ranks
need the Python that has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from record import Record, program  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]

MODELS = {"382": (30, 1030), "2016": (40, 2048)}
"""MB of states: layers, width"""


def ratios(over: list[float], under: list[float]) -> list[float]:
    return [one / other for one, other in zip(over, under, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=MODELS, default="382")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=0, help="of a block with a save behind each; 0: not measured")
    parser.add_argument("--batch", type=int, default=512, help="rows of a step's batch")
    parser.add_argument("--folder", help="on the disk that is measured (default: beside the build)")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    record = Record(benchmark="checkpoint/save")
    layers, width = MODELS[arguments.size]
    with tempfile.TemporaryDirectory(dir=arguments.folder or arguments.build) as folder:
        command = [program(arguments.build, "zeroth-run"), "-n", arguments.ranks, arguments.python]
        command += [pathlib.Path(__file__).with_name("save_rank.py"), "--folder", folder]
        command += ["--out", f"{folder}/out-%d.json", "--layers", layers, "--width", width]
        command += ["--rounds", arguments.rounds, "--steps", arguments.steps, "--batch", arguments.batch]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(arguments.build / "python")}
        subprocess.run([str(word) for word in command], env=environment, check=True)
        ranks = [json.loads((pathlib.Path(folder) / f"out-{rank}.json").read_text()) for rank in range(arguments.ranks)]
    seconds = {
        name: [max(values) for values in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["seconds"]
    }
    megabytes = ranks[0]["bytes"] / 1e6
    record.settings = {"ranks": arguments.ranks, "state_MB": megabytes, "rounds": arguments.rounds, "stage": 3}
    record.settings |= {"layers": layers, "width": width, "batch": arguments.batch, "steps": arguments.steps}
    for name, values in seconds.items():
        record.add(name, "s", values, "none" if name.startswith("limit") else "lower")
    for name in ("limit: write", "zeroth: save", "torch.save and fsync, rank 0", "DCP: save"):
        record.add(f"{name}, speed", "MB/s", [megabytes / value for value in seconds[name]], "higher")

    def against(name: str, over: str, under: str, bar: float | None = None, better: str = "lower") -> None:
        record.add(name, "x", ratios(seconds[over], seconds[under]), better, bar)

    against("write limit over save", "limit: write", "zeroth: save", 0.9, "higher")
    against("stall over memory copy", "zeroth: save behind, stall", "limit: memory copy", 1.5)
    against("load over read limit, disk", "zeroth: load, disk", "limit: read, disk", 1.3)
    against("load over read limit, cache", "zeroth: load, cache", "limit: read, cache", 1.3)
    against("torch.save and fsync over save", "torch.save and fsync, rank 0", "zeroth: save", None, "higher")
    against("DCP over save", "DCP: save", "zeroth: save", None, "higher")
    against("DCP's stall over stall", "DCP async: stall", "zeroth: save behind, stall", None, "higher")
    if arguments.steps:
        plain, saving = seconds["steps"], seconds["steps with a save behind each"]
        blocks = range(0, len(plain), 2)
        record.add(
            "steps with a save behind each over steps",
            "x",
            [(saving[at] + saving[at + 1]) / (plain[at] + plain[at + 1]) for at in blocks],
            "lower",
            1.05,
        )
        record.add("a step", "s", [value / arguments.steps for value in plain])
    record.notes.append("a sample is the time of the slowest rank; ratios are of samples of the same round")
    record.count_foreign()
    record.write(arguments.json)


if __name__ == "__main__":
    main()
