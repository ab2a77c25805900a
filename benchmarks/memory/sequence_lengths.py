#!/usr/bin/env python3
"""The longest sequence that trains in a given memory: sp = 1, 2, 4, with and without tiles; planned and measured.

  sequence_lengths.py [--build DIR] [--ranks 1,2,4] [--mib 16] [--json FILE]

The memory is that of a rank for activations and what backward computes with them: parameters, gradients and optimizer
states are ZeRO's, and Engine.memory_report() has them. Model: Llama of transformers in float32 with checkpoints around
its blocks, its sequence split by Ulysses. Planned bytes are the formula of sequence_lengths_rank.py; measured ones are
the peak of torch's CPU allocator, temporaries inside of operators included, of the rank with most. At the longest
sequence by the formula, and at one a tenth longer, which must not fit. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from record import Record, program  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
BOUND = 0.02
"""by which a measured peak may lie beside the planned one"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--mib", type=float, default=16.0)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    record = Record(benchmark="memory/sequence_lengths")
    record.settings = {"mib": arguments.mib, "ranks": arguments.ranks}
    print(f"{'':>22}{'longest':>10}{'planned MiB':>14}{'measured MiB':>14}{'a tenth longer':>16}")
    for ranks in (int(word) for word in arguments.ranks.split(",")):
        command = [str(program(arguments.build, "zeroth-run")), "-n", str(ranks), "--no-merge", "--env"]
        command += ["OMP_NUM_THREADS=1", sys.executable, str(HERE / "sequence_lengths_rank.py"), str(arguments.mib)]
        environment = os.environ | {"PYTHONPATH": f"{arguments.build}/python"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            sys.exit(f"{ranks} ranks: the program failed\n{done.stdout}{done.stderr}")
        lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"tiles"' in line]
        record.settings |= json.loads(lines[0])["model"]
        for found in map(json.loads, lines):
            name = f"sp {ranks}, {'tiles' if found['tiles'] else 'no tiles'}"
            planned, measured, longer = (found[key] / 2**20 for key in ("planned", "measured", "measured_longer"))
            print(f"{name:>22}{found['tokens']:>10}{planned:>14.2f}{measured:>14.2f}{longer:>16.2f}")
            record.add(f"{name}: longest sequence", "tokens", [float(found["tokens"])], "higher")
            record.add(f"{name}: planned", "MiB", [planned], "lower")
            record.add(f"{name}: measured", "MiB", [measured], "lower")
            if abs(measured / planned - 1) > BOUND or longer <= arguments.mib:
                record.notes.append(f"{name}: PLANNED AND MEASURED BYTES DIFFER")
    for note in record.notes:
        print(note)
    record.write(arguments.json)


if __name__ == "__main__":
    main()
