"""The step of one rank on a GPU with states beside it (bus_bench), and torch's in turns with it: fused AdamW on the
device, and by hand with states in host memory - gradients to pinned memory, torch's fused AdamW of the CPU, parameters
back. With a folder also states in files, beside what store_bench reaches there in the same pattern.

  python benchmarks/offload/bus.py --build DIR [--folder DIR] [--params N] [--turns N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from record import Record  # noqa: E402

UNITS = 16
BLOCK = 1 << 20
"""elements that cross the bus together"""
STATES = 8
"""bytes an element of AdamW's two moments, which are read and written"""

TORCH_TURN = """
import json, statistics, sys, time
import torch
params, units, threads, rounds = map(int, sys.argv[1:5])
torch.set_num_threads(threads)
size = params // units

def median(call):
    times = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.1, fused=True)

there = [torch.zeros(size, device="cuda", requires_grad=True) for _ in range(units)]
for parameter in there:
    parameter.grad = torch.full_like(parameter, 1e-3)
optimizer = adamw(there)

def on_device():
    torch.nn.utils.clip_grad_norm_(there, float("inf"))
    optimizer.step()

result = {"device": median(on_device)}
del optimizer
here = [torch.zeros(size, pin_memory=True).requires_grad_(True) for _ in range(units)]
for parameter in here:
    parameter.grad = torch.zeros(size, pin_memory=True)
optimizer = adamw(here)

def by_hand():
    for parameter, other in zip(here, there):
        parameter.grad.copy_(other.grad, non_blocking=True)
    torch.cuda.synchronize()
    optimizer.step()
    with torch.no_grad():
        for parameter, other in zip(here, there):
            other.copy_(parameter, non_blocking=True)

result["host"] = median(by_hand)
result["card"] = torch.cuda.get_device_name()
result["torch"] = torch.__version__
print(json.dumps(result))
"""


def output(*command: Any) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=600).stdout


def bus_turn(arguments: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Rows of one fresh bus_bench."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        output(
            *(arguments.build / "benchmarks/bus_bench", "--params", arguments.params, "--units", UNITS),
            *("--rounds", arguments.rounds, "--threads", arguments.threads, "--block", BLOCK, "--json", file.name),
            *(("--folder", folder) if folder else ()),
        )
        rows: list[dict[str, Any]] = json.loads(pathlib.Path(file.name).read_text(encoding="utf-8"))["rows"]
    return rows


def disk_speed(arguments: argparse.Namespace) -> float:
    """Bytes a second, read and written."""
    line = output(
        *(arguments.build / "benchmarks/store_bench", arguments.folder, "--block", STATES * BLOCK),
        *("--bytes", STATES * arguments.params, "--seconds", 4),
    )
    return float(json.loads(line)["update_bytes_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="folder of a build, with benchmarks/")
    parser.add_argument("--folder", default="", help="also with states in files of this folder")
    parser.add_argument("--params", type=int, default=1 << 28)
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="steps of a process, of each kind")
    parser.add_argument("--threads", type=int, default=16, help="of the host")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in ("params", "turns", "rounds", "threads")}
    record = Record(benchmark="offload/bus", settings=settings | {"units": UNITS, "block": BLOCK})
    rows: dict[str, list[float]] = {}
    units: dict[str, tuple[str, str]] = {}
    theirs: dict[str, list[float]] = {"device": [], "host": []}
    for turn in range(arguments.turns):
        for row in bus_turn(arguments, arguments.folder if turn == 0 else ""):
            rows.setdefault(row["name"], []).append(row["median"])
            units[row["name"]] = (row["unit"], row["better"])
        command = (sys.executable, "-c", TORCH_TURN, arguments.params, UNITS, arguments.threads, arguments.rounds)
        told = json.loads(output(*command))
        for name, samples in theirs.items():
            samples.append(told[name])
        record.versions |= {"torch": told["torch"], "card": told["card"]}
    for name, samples in rows.items():
        record.add(name, *units[name][:1], samples, better=units[name][1])
    names = {"device": "states on the device", "host": "states in host memory"}
    for where, name in names.items():
        ours = rows[f"step, float32, {name}"]
        record.add(f"torch, float32, {name}", "ms", theirs[where], better="none")
        ratios = [one / other for one, other in zip(ours, theirs[where], strict=True)]
        record.add(f"step, float32, {name}, over torch", "ratio", ratios, better="lower", bar=1.0)
    if arguments.folder:
        speed = disk_speed(arguments)
        record.add("blocks of states through the folder, read and written", "GB/s", [speed / 1e9])
        floor = 2 * STATES * arguments.params / speed * 1e3
        step = statistics.median(rows["step, float32, states in files"])
        name = "step, float32, states in files, over the disk's time"
        record.add(name, "ratio", [step / floor], better="lower", bar=1 / 0.85)
    record.notes.append("one rank, ZeRO-0, AdamW, no clipping; the step alone, after a backward; with the exact norm")
    record.notes.append("a sample is the median of one process; processes of both kinds take turns")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
