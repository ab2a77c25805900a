#!/usr/bin/env python3
"""What an action of a pipeline costs when it holds hardly any arithmetic, beside the peers.

  actions.py [--build DIR] [--python FILE] [--micro 64] [--cycles N] [--steps N] [--without NAME ...] [--json FILE]

Two stages of a linear of 8 x 8, 1F1B, 2 ranks. The floor is the loop of forwards, backwards and the update of one stage
by plain torch, without messages. An action's cost is (step - floor) / actions, with the number of Zeroth's actions on a
rank (forwards, backwards, sends, receives) for everybody; the wait for messages is in it, but not in its processor time
where ranks do not spin. The rows of single kinds are medians of Zeroth's executor
called action by action; what a receive waits for is in them. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "peers")]
import ranks  # noqa: E402
from places import find_places  # noqa: E402
from record import Record  # noqa: E402
from setups import STAGES  # noqa: E402

BAR = 20.0
"""microseconds an action of Zeroth"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=HERE.parents[1] / "build/venv/bin/python")
    for name, value in (("micro", 64), ("cycles", 20), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--without", nargs="*", default=[], help="peers that are left out: torch, deepspeed")
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    places = find_places(given.build.absolute(), given.python.absolute())
    record = Record(benchmark="pipeline/actions")
    found, without = None, list(given.without)
    while found is None:
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            launcher = [str(places.launcher), "-q", "--no-prefix", "-n", str(STAGES), str(places.python)]
            numbers = [f"--{name}={getattr(given, name)}" for name in ("micro", "cycles", "steps")]
            words = [str(HERE / "actions_rank.py"), "--report", str(folder / "result"), *numbers]
            try:
                ranks.run([[*launcher, *words, "--without", *without]], places, folder, ["result"])
            except ranks.Failed as failure:
                culprit = ranks.at_work(folder)
                if culprit not in ("torch", "deepspeed"):
                    sys.exit(f"actions.py: the ranks failed: {failure}")
                record.failures[culprit] = str(failure)
                without.append(culprit)
                continue
            found = json.loads((folder / "result").read_text(encoding="utf-8"))
    record.versions["torch"] = found["torch"]
    record.settings |= {"stages": STAGES, "micro_batches": given.micro, "cycles": given.cycles, "steps": given.steps}
    record.settings["actions"] = found["actions"]
    cycles = found["cycles"]
    for name in cycles[0]:
        record.add(f"{name}: step", "ms", [1e3 * cycle[name][0] for cycle in cycles], "lower")
    for place, what in enumerate(("an action", "processor time of an action")):
        for name in cycles[0]:
            if name != "floor":
                over = [1e6 * (cycle[name][place] - cycle["floor"][place]) / found["actions"] for cycle in cycles]
                bar = BAR if name == "zeroth" and place == 0 else None
                record.add(f"{name}: {what}", "us", over, "lower", bar)
    for rank, kinds in enumerate(found["kinds"]):
        for kind, microseconds in kinds.items():
            record.add(f"zeroth: {kind}, rank {rank}", "us", [microseconds], "lower")
    record.count_foreign()
    record.write(given.json)


if __name__ == "__main__":
    main()
