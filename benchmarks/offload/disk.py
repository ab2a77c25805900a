#!/usr/bin/env python3
"""Transfers to files beside the disk: Zeroth's queue and store, fio, and DeepSpeed's async_io, in turns.

  disk.py FOLDER [--build DIR] [--peers PYTHON] [--rounds N] [--seconds S] [--mib N] [--json FILE]

Every contestant has the same block size, depth, direct flag and file size; each round runs all of them once, in an
order that alternates. "update": the optimizer's pattern, each block read and then written. `--peers`: a Python that has
DeepSpeed (benchmarks/peers/requirements.txt) and, on Debian, libaio-dev; without it async_io is left out. Plain
Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from record import Record, program  # noqa: E402

BLOCK = 1 << 20
DEPTH = 8
STATE_BLOCK = 3 << 20
"""master and two moments of 262,144 elements"""
Speeds = dict[str, float]
"""bytes a second: "read", "write", "update" (both directions together)"""


def output(*command: str | pathlib.Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Turns:
    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        self.folder = folder
        self.bytes = arguments.mib << 20
        self.seconds = arguments.seconds
        self.bench = program(arguments.build, "zeroth-bench")
        self.store = arguments.build / "benchmarks/store_bench"
        self.peers = arguments.peers

    def queue(self) -> Speeds:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            output(
                *(self.bench, "io", self.folder, "--engines", "io_uring", "--blocks", f"{BLOCK >> 10}KiB"),
                *("--depths", str(DEPTH), "--bytes", f"{self.bytes >> 20}MiB", "--seconds", str(self.seconds)),
                *("--json", file.name),
            )
            row = json.loads(pathlib.Path(file.name).read_text(encoding="utf-8"))["rows"][0]
        return {"read": row["read_bytes_per_s"], "write": row["write_bytes_per_s"]}

    def states(self) -> Speeds:
        line = output(
            *(self.store, self.folder, "--bytes", str(self.bytes), "--block", str(STATE_BLOCK), "--slots", "6"),
            *("--depth", str(DEPTH), "--seconds", str(self.seconds)),
        )
        return {"update": json.loads(line)["update_bytes_per_s"]}

    def fio(self) -> Speeds:
        def job(pattern: str, block: int) -> float:
            text = output(
                *("fio", "--name=a", f"--filename={self.folder}/fio", f"--size={self.bytes}", f"--rw={pattern}"),
                *(f"--bs={block}", f"--iodepth={DEPTH}", "--direct=1", "--ioengine=io_uring", "--time_based"),
                *(f"--runtime={self.seconds}", "--output-format=json", "--fallocate=posix"),
            )
            ran = json.loads(text)["jobs"][0]
            return float(ran["read"]["bw_bytes"] + ran["write"]["bw_bytes"])

        return {"write": job("write", BLOCK), "read": job("read", BLOCK), "update": job("rw", BLOCK)}

    def async_io(self) -> Speeds:
        text = output(
            *(self.peers, HERE / "async_io.py", self.folder, str(self.bytes), str(BLOCK), str(DEPTH)),
            str(self.seconds),
        )
        return {str(name): float(speed) for name, speed in json.loads(text.strip().splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--peers", default="")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        turns = Turns(arguments, folder)
        contestants: dict[str, Callable[[], Speeds]] = {"queue": turns.queue, "store": turns.states}
        if shutil.which("fio"):
            contestants["fio"] = turns.fio
        if arguments.peers:
            contestants["async_io"] = turns.async_io
        seen: dict[str, list[Speeds]] = {name: [] for name in contestants}
        for number in range(arguments.rounds):
            for name in sorted(contestants, reverse=number % 2 == 1):
                seen[name].append(contestants[name]())
    record = Record(
        benchmark="offload/disk",
        settings={"block": BLOCK, "depth": DEPTH, "state_block": STATE_BLOCK, "mib": arguments.mib},
        notes=["update: bytes read and bytes written together"],
    )
    for name, rounds in seen.items():
        for pattern in rounds[0]:
            record.add(f"{name}: {pattern}", "MB/s", [speeds[pattern] / 1e6 for speeds in rounds], better="higher")
    ours = {"read": "queue", "write": "queue", "update": "store"}
    for peer, bar in (("fio", 0.9), ("async_io", 1.0)):
        for pattern, name in ours.items() if peer in seen else ():
            ratios = [a[pattern] / b[pattern] for a, b in zip(seen[name], seen[peer])]
            record.add(f"{name} / {peer}: {pattern}", "ratio", ratios, better="higher", bar=bar)
    record.count_foreign()
    record.write(arguments.json)


if __name__ == "__main__":
    main()
