#!/usr/bin/env python3
"""Steps with the optimizer's states in host memory and in files, beside states in place: Zeroth and DeepSpeed, in
paired blocks.

  step.py FOLDER [--work 25m] [--ranks 2] [--dtype fp32] [--cycles N] [--json FILE] [--build DIR] [--python PYTHON]

Both libraries run the same model on the same data in one job; DeepSpeed has files at stage 3 alone, and its own
DeepSpeedCPUAdam where states are offloaded. "inside": with updates inside backward. "tuned": in parts of 2 million
elements, of which one is read and one written while another is updated; by itself DeepSpeed reads all, updates, and
writes. A contestant that fails is named in the result.

The first run installs DeepSpeed into build/peers-venv and compiles its operators there, which wants a network, a C++
compiler and libaio.h (Debian: libaio-dev). --prepare does that alone, so that a measurement compiles nothing. Plain
Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
sys.path.insert(0, str(HERE.parent / "peers"))
import ranks  # noqa: E402
from cells import Cell  # noqa: E402
from places import ROOT, Places, compile_for_offload, find_places  # noqa: E402
from record import Record  # noqa: E402

BASES = {
    "zeroth-1-host": "zeroth-1",
    "zeroth-1-files": "zeroth-1",
    "zeroth-3-files": "zeroth-3",
    "zeroth-1-files-inside": "zeroth-1",
    "zeroth-3-files-inside": "zeroth-3",
    "deepspeed-1-host": "deepspeed-1",
    "deepspeed-3-files": "deepspeed-3",
    "deepspeed-3-files-tuned": "deepspeed-3",
}
"""whose step without offload a contestant is compared with"""
RIVALS = (
    ("zeroth-1-host", "deepspeed-1-host"),
    ("zeroth-3-files", "deepspeed-3-files"),
    ("zeroth-3-files", "deepspeed-3-files-tuned"),
)
BARS = {"zeroth-1-host": 1.03}
NAMES = [*sorted(set(BASES.values())), *BASES]
Walls = dict[str, list[float]]
"""seconds a step, one a cycle"""


def run(names: list[str], cell: Cell, places: Places, folder: str, failures: dict[str, str]) -> Walls:
    """Again without the one that fails."""
    with tempfile.TemporaryDirectory() as report:
        words = ["--folder", folder, "--contestants", ",".join(names), "--report", report]
        try:
            command = ranks.launched(places, cell, str(HERE / "step_rank.py"), words)
            ranks.run(command, places, pathlib.Path(report), ["blocks.json"])
        except ranks.Failed as failure:
            culprit = ranks.at_work(pathlib.Path(report)) or names[0]
            failures[culprit] = str(failure)
            rest = [name for name in names if name != culprit]
            return run(rest, cell, places, folder, failures) if rest else {}
        blocks = json.loads((pathlib.Path(report) / "blocks.json").read_text(encoding="utf-8"))
    return {name: [cycle["wall"] for cycle in block["cycles"]] for name, block in blocks.items()}


OPERATORS = {
    "deepspeed-1-host": ["CPUAdamBuilder"],
    "deepspeed-3-files": ["CPUAdamBuilder", "AsyncIOBuilder"],
    "deepspeed-3-files-tuned": ["CPUAdamBuilder", "AsyncIOBuilder"],
}
"""that DeepSpeed compiles for a contestant"""


def prepared(names: list[str], places: Places, failures: dict[str, str]) -> list[str]:
    """The contestants that can run; `failures` gets why others cannot."""
    failed = compile_for_offload(places) if any(name in OPERATORS for name in names) else {}
    for name in names:
        for operator in OPERATORS.get(name, []):
            if operator in failed:
                failures[name] = f"DeepSpeed cannot compile its {operator}: {failed[operator]}"
    return [name for name in names if name not in failures]


def add_rows(record: Record, walls: Walls) -> None:
    for name, seconds in walls.items():
        record.add(f"{name}: step", "ms", [1e3 * value for value in seconds], better="lower")
    for name, base in BASES.items():
        if name in walls and base in walls:
            ratios = [a / b for a, b in zip(walls[name], walls[base])]
            record.add(f"{name} / {base}", "ratio", ratios, better="lower", bar=BARS.get(name))
    for name, rival in RIVALS:
        if name in walls and rival in walls:
            record.add(
                f"{name} / {rival}",
                "ratio",
                [a / b for a, b in zip(walls[name], walls[rival])],
                better="lower",
                bar=1.0,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument(
        "--prepare", action="store_true", help="install and compile what the contestants need; measure nothing"
    )
    parser.add_argument("--work", default="25m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--block-seconds", type=float, default=2.0)
    parser.add_argument("--contestants", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--json")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    venv = ROOT / "build/venv/bin/python"
    parser.add_argument("--python", type=pathlib.Path, default=venv if venv.exists() else pathlib.Path(sys.executable))
    arguments = parser.parse_args()
    cell = Cell(
        name="offload-step",
        work=arguments.work,
        dtype=arguments.dtype,
        ranks=arguments.ranks,
        cycles=arguments.cycles,
        block_seconds=arguments.block_seconds,
    )
    places = find_places(arguments.build.resolve(), arguments.python.absolute())
    record = Record(benchmark="offload/step")
    names = prepared(arguments.contestants, places, record.failures)
    if arguments.prepare:
        sys.exit("\n".join(f"{name}: {why}" for name, why in record.failures.items()) or None)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        walls = run(names, cell, places, folder, record.failures)
    record.settings = {"work": cell.work, "dtype": cell.dtype, "ranks": cell.ranks, "cycles": cell.cycles}
    add_rows(record, walls)
    record.count_foreign()
    record.write(arguments.json)


if __name__ == "__main__":
    main()
