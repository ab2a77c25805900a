"""AdamW of adamw_bench beside torch's fused AdamW: one flat fp32 tensor, 1 and 2 threads.

Page placement decides between two speeds of one process (by up to 1.5x with 2 threads), so processes of both kinds take turns and every
turn starts afresh; the table shows the median and the fastest turn.

Run: python benchmarks/kernels/adamw_torch.py --bench BUILD/benchmarks/adamw_bench [--params N] [--turns N] [--threads 1 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH_TURN = """
import sys, time, torch
params, threads, steps = map(int, sys.argv[1:4])
torch.set_num_threads(threads)
p = torch.full((params,), 0.01, requires_grad=True)
p.grad = torch.full((params,), 1e-3)
optimizer = torch.optim.AdamW([p], lr=1e-5, weight_decay=0.1, fused=True)
times = []
for _ in range(steps + 2):
    start = time.perf_counter()
    optimizer.step()
    times.append((time.perf_counter() - start) * 1e3)
print(torch.__version__, *times[2:])
"""


def torch_turn(params: int, threads: int, steps: int) -> tuple[str, list[float]]:
    """Milliseconds of each step of one fresh process, and torch's version."""
    command = [sys.executable, "-c", TORCH_TURN, str(params), str(threads), str(steps)]
    words = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.split()
    return words[0], [float(word) for word in words[1:]]


def zeroth_turn(bench: Path, params: int, threads: int, rounds: int) -> dict[str, float]:
    """Rows of one fresh run of adamw_bench: name -> median."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(bench), "--params", str(params), "--threads", str(threads), "--rounds", str(rounds)]
        command += ["--passes", "1", "--json", file.name]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        rows = json.loads(Path(file.name).read_text())["rows"]
    return {row["name"]: row["median"] for row in rows}


def main() -> None:
    """Takes turns and prints one line a number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="the adamw_bench program")
    parser.add_argument("--params", type=int, default=50_000_000)
    parser.add_argument("--turns", type=int, default=5, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=10, help="steps of a torch process, blocks of an adamw_bench process")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()

    results = []
    for threads in arguments.threads:
        suffix = f", {threads} thread" + ("s" if threads > 1 else "")
        medians: dict[str, list[float]] = {"zeroth": [], "stream": [], "torch": []}
        fastest: dict[str, list[float]] = {"zeroth": [], "stream": [], "torch": []}
        version = ""
        for _ in range(arguments.turns):
            rows = zeroth_turn(arguments.bench, arguments.params, threads, arguments.steps)
            for key, name in (("zeroth", "adamw"), ("stream", "stream")):
                medians[key].append(rows[name + suffix])
                fastest[key].append(rows["fastest " + name + suffix])
            version, times = torch_turn(arguments.params, threads, arguments.steps)
            medians["torch"].append(statistics.median(times))
            fastest["torch"].append(min(times))
        for key in medians:
            results.append(
                {
                    "name": key,
                    "threads": threads,
                    "median_ms": statistics.median(medians[key]),
                    "fastest_ms": min(fastest[key]),
                }
            )
        print(f"{arguments.params} parameters{suffix}, torch {version}, {arguments.turns} processes each:")
        for row in results[-3:]:
            print(f"  {row['name']:8s} median {row['median_ms']:7.2f} ms   fastest {row['fastest_ms']:7.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
