#!/usr/bin/env python3
"""All peers beside Zeroth at the same work: writes a result for each cell, and their tables into docs/peers.md.

  peers.py                                   every cell: benchmarks/results/ and docs/peers.md
  peers.py --cells NAME ...                  some of them
  peers.py --out DIR                         results elsewhere; the page stays as it is
  peers.py --cells NAME --json FILE          one cell, one file; the page stays as it is
  peers.py --quick                           shows that it works, in build/; the numbers mean nothing
  peers.py --list                            the cells, and about how long each takes

A contestant that fails is named in the result and in the table. DeepSpeed is installed into build/peers-venv on first
use. Plain Python 3; the ranks run with the Python that has torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import signal
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import table  # noqa: E402
from cells import CELLS, ENTRIES, MICRO_BATCH, Cell  # noqa: E402
from measure import Measurement  # noqa: E402
from places import ROOT, Places, find_places  # noqa: E402
from record import Record  # noqa: E402
from rows import add_rows  # noqa: E402


def measure(cell: Cell, places: Places, path: pathlib.Path, only: list[str]) -> None:
    record = Record(benchmark="peers/cell", command=f"peers.py --cells {cell.name} --cycles {cell.cycles}")
    entries = [entry for entry in cell.entries() if not only or entry.name in only or entry.name == "floor"]
    measured = Measurement(cell, entries, places)
    measured.run()
    add_rows(record, measured)
    facts: dict[str, Any] = next(
        (solo.reports[0] for solo in measured.solo.values()), {"versions": {}, "parameters": 0}
    )
    record.versions |= facts["versions"]
    record.settings = dataclasses.asdict(cell) | {
        "parameters": facts["parameters"],
        "micro_batch": MICRO_BATCH,
        "contestants": [entry.name for entry in entries],
        "jobs": measured.jobs,
        "bytes_by_state": {
            name: solo.reports[0]["bytes_by_state"]
            for name, solo in measured.solo.items()
            if solo.reports[0]["bytes_by_state"]
        },
        "backend": "gloo",
        "threads_per_rank": 1,
        "deepspeed_operator_seconds": places.operator_seconds,
    }
    record.failures = measured.failures
    record.notes = [
        "step: paired blocks; the ratio is of the same cycle, own two blocks over the floor's two",
        "tracked bytes, PSS, wire and start-up: a process holds one contestant",
        "wire: zeroth by its counters of copied bytes, all others by the received bytes of the loopback interface",
        *measured.notes,
    ]
    record.count_foreign()
    record.write(str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], metavar="NAME")
    parser.add_argument(
        "--contestants", nargs="+", choices=[entry.name for entry in ENTRIES], default=[], metavar="NAME"
    )
    parser.add_argument("--cycles", type=int, help="instead of the cell's own")
    parser.add_argument("--startup-rounds", type=int, help="instead of the cell's own")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    venv = ROOT / "build/venv/bin/python"
    parser.add_argument("--python", type=pathlib.Path, default=venv if venv.exists() else pathlib.Path(sys.executable))
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results")
    parser.add_argument("--json", type=pathlib.Path, help="file for the result of one cell")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    cells = [cell for cell in CELLS if not arguments.cells or cell.name in arguments.cells]
    if arguments.list:
        for cell in cells:
            print(f"{cell.name:<26} {cell.minutes:5.0f} min")
        return 0
    if arguments.json and len(cells) != 1:
        parser.error("--json is for one cell")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no job is left behind
    places = find_places(arguments.build.resolve(), arguments.python.absolute())
    out = arguments.out or (arguments.build / "benchmarks/results" if arguments.quick else table.RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        cell = cell.quick() if arguments.quick else cell
        changes = {"cycles": arguments.cycles, "startup_rounds": arguments.startup_rounds}
        cell = dataclasses.replace(cell, **{name: value for name, value in changes.items() if value is not None})
        path = arguments.json or out / f"{cell.name}.json"
        measure(cell, places, path, arguments.contestants)
        print(table.steps(json.loads(path.read_text(encoding="utf-8"))))
    if not arguments.json and out == table.RESULTS:
        table.write_page(ROOT / "docs/peers.md", out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
