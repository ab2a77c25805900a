#!/usr/bin/env python3
"""The measured bubble of schedules whose computations sleep for known times, beside the simulated one.

  sleeping.py [--build DIR] [--python FILE] [--stages 2 3 4] [--micro 8] [--times 40,40,40] [--steps N]
              [--schedules NAME ...] [--json FILE]

A sleeping rank takes no core, so that 4 ranks on 2 cores are measured as well as 2. The simulation is `zeroth schedule`
with the same times. The bubble is the longest wait of a rank between its first computation and its last one, in percent
of what it computes. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "peers")]
import ranks  # noqa: E402
from places import Places  # noqa: E402
from record import Record, program  # noqa: E402

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zb-v": 2,
    "v-half": 2,
    "v-min": 2,
    "dualpipev": 2,
}
"""chunks on a rank"""
POINT = 1.0
"""percent: measured and simulated bubble are to be within it"""


def simulated(places: Places, words: list[str], times: str) -> float:
    """Percent of what the busiest rank computes. Times are in milliseconds, as the unit does not matter."""
    command = [str(program(places.build, "zeroth")), "schedule", *words, "--costs", times]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"^step [\d.e+-]+, bubble ([\d.e+-]+):", text, re.MULTILINE)
    rows = re.findall(r"^\d+ +([\d.e+-]+) +[\d.e+-]+ +\d+", text, re.MULTILINE)
    if found is None or not rows:
        sys.exit(f"sleeping.py: the output of {' '.join(command)} cannot be read")
    return 100 * float(found[1]) / max(map(float, rows))


def measured(folder: pathlib.Path, steps: int, stages: int) -> list[float]:
    """Percent, one a step."""
    found = []
    for number in range(steps):
        one = [json.loads((folder / f"step{number}.rank{rank}.json").read_text()) for rank in range(stages)]
        bubble = max(rank["last"] - rank["first"] - rank["busy"] for rank in one)
        found.append(100 * bubble / max(rank["busy"] for rank in one))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=HERE.parents[1] / "build/venv/bin/python")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--times", default="40,40,40", help="milliseconds of F, I and W of a chunk")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    places = Places(build=given.build.absolute(), python=given.python.absolute(), operator_seconds=0.0)
    record = Record(benchmark="pipeline/sleeping")
    record.settings |= {"micro_batches": given.micro, "times_ms": given.times, "steps": given.steps}
    for stages in given.stages:
        for schedule in given.schedules:
            chunks = SCHEDULES[schedule]
            name = f"{schedule}, {stages} stages"
            print(name, file=sys.stderr, flush=True)
            words = [schedule, "--stages", str(stages), "--micro", str(given.micro), "--chunks", str(chunks)]
            expected = simulated(places, words, given.times)
            with tempfile.TemporaryDirectory() as report:
                folder = pathlib.Path(report)
                launcher = [str(places.launcher), "-q", "--no-prefix", "-n", str(stages), str(places.python)]
                rank = [str(HERE / "sleeping_rank.py"), "--report", str(folder / "result"), "--schedule", schedule]
                numbers = [f"--chunks={chunks}", f"--micro={given.micro}", f"--steps={given.steps}"]
                try:
                    ranks.run([[*launcher, *rank, *numbers, "--times", given.times]], places, folder, ["result"])
                except ranks.Failed as failure:
                    record.failures[name] = str(failure)
                    continue
                found = measured(folder, given.steps, stages)
                record.versions["torch"] = json.loads((folder / "result").read_text(encoding="utf-8"))["torch"]
            record.add(f"{name}: simulated bubble", "%", [expected])
            record.add(f"{name}: bubble", "%", found, "lower")
            record.add(f"{name}: apart", "points", [abs(one - expected) for one in found], "lower", POINT)
    record.count_foreign()
    record.write(given.json)
    if not record.rows:
        sys.exit("sleeping.py: no schedule was measured")


if __name__ == "__main__":
    main()
