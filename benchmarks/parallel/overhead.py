#!/usr/bin/env python3
"""What tensor and sequence parallelism over 2 ranks cost beyond the floor, beside peers, forward and backward.

  overhead.py tensor|sequence [--build DIR] [--python FILE] [--cycles N] [--tokens 2048] [--layers 8] [--json FILE]

Model: the blocks of transformers' Llama, 25 M parameters, one sample, float32, one thread a rank. The floor is what one
rank computes with communication left out, by plain torch. Peers: torch's DTensor tensor parallelism over gloo;
DeepSpeed's DistributedAttention over gloo, installed as peers/ says. All take turns in one run (overhead_rank.py).
Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "peers")]
from places import find_places  # noqa: E402
from record import Record  # noqa: E402

CONTESTANTS = {
    "tensor": ["floor", "zeroth", "dtensor"],
    "sequence": ["floor", "zeroth", "deepspeed"],
}
BAR = 1.05
"""of zeroth over the floor"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=CONTESTANTS)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=HERE.parents[1] / "build/venv/bin/python")
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    names = CONTESTANTS[given.part]
    places = find_places(given.build.absolute(), given.python.absolute())
    record = Record(benchmark="parallel/overhead")
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result")
        rank = [given.part, *names, "--cycles", given.cycles, "--tokens", given.tokens, "--layers", given.layers]
        command = [places.launcher, "-q", "--no-prefix", "-n", 2, places.python, HERE / "overhead_rank.py", *rank]
        words = [str(word) for word in [*command, "--result", result]]
        if subprocess.run(words, env=places.environment(), check=False).returncode != 0:
            sys.exit("overhead.py: the ranks failed")
        found = json.loads(result.read_text(encoding="utf-8"))
    record.settings |= found["settings"]
    record.versions |= found["versions"]
    cycles = found["cycles"]
    for kind, unit in (("wall", "ms"), ("cpu", "ms")):
        for name in names:
            record.add(f"{name} {kind}", unit, [1000 * cycle[name][kind] for cycle in cycles], "lower")
        for name in names[1:]:
            bar = BAR if (name, kind) == ("zeroth", "wall") else None
            record.add(f"{name} / floor {kind}", "ratio", ratios(cycles, name, "floor", kind), "lower", bar)
        record.add(f"zeroth / {names[-1]} {kind}", "ratio", ratios(cycles, "zeroth", names[-1], kind), "lower")
    record.notes += found["notes"]
    record.count_foreign()
    record.write(given.json)


def ratios(cycles: list[dict[str, dict[str, float]]], name: str, base: str, kind: str) -> list[float]:
    return [cycle[name][kind] / cycle[base][kind] for cycle in cycles]


if __name__ == "__main__":
    main()
