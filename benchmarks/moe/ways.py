#!/usr/bin/env python3
"""Ways in which tokens and experts meet (zeroth.experts.*), beside each other on one layer with an uneven router.

  ways.py [--ranks 4] [--width 256] [--tokens 1024] [--experts 16] [--cycles N] [--build DIR] [--python FILE]
          [--json FILE]

k = 2, experts of two matrices (width to 4 width and back) with ReLU, float32, one thread a rank; forward and backward.
Expert e is chosen in proportion to 1 / (e + 1), so that the ranks with the first experts have most rows. Ways take
turns in one run. Rows: the greatest number that a rank computes, divided by the mean; 1 is even. Received bytes are
those of the rank with most. Copies: experts of others on the rank with most. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "support"))
from record import Record, program  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=ROOT / "build/venv/bin/python")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    record = Record(benchmark="moe/ways")
    record.settings |= {key: getattr(given, key) for key in ("ranks", "tokens", "width", "experts", "cycles")}
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result")
        sizes = [word for key in ("cycles", "tokens", "width", "experts") for word in (f"--{key}", getattr(given, key))]
        command = [program(given.build.absolute(), "zeroth-run"), "-q", "--no-prefix", "-n", given.ranks]
        command += [given.python, HERE / "ways_rank.py", *sizes, "--result", result]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(given.build.absolute() / "python"), os.environ.get("PYTHONPATH", "")])
            ),
        }
        if subprocess.run([str(word) for word in command], env=environment, check=False).returncode != 0:
            sys.exit("ways.py: the ranks failed")
        found = json.loads(result.read_text(encoding="utf-8"))
    for name, walls in found["walls"].items():
        record.add(f"{name}: wall", "ms", [1000 * wall for wall in walls], "lower")
    base = found["walls"]["experts"]
    for name, walls in found["walls"].items():
        if name != "experts":
            record.add(f"{name} / experts: wall", "ratio", [a / b for a, b in zip(walls, base, strict=True)], "lower")
    for name, facts in found["facts"].items():
        record.add(f"{name}: rows, greatest / mean", "ratio", [facts["rows"]], "lower")
        record.add(f"{name}: received bytes", "MiB", [facts["received"] / 2**20], "lower")
        record.add(f"{name}: copies", "experts", [facts["copies"]], "lower")
    record.count_foreign()
    record.write(given.json)


if __name__ == "__main__":
    main()
