"""AdamW of adamw_bench beside torch's fused AdamW: one flat fp32 tensor, 1 and 2 threads.

Page placement decides between two speeds of one process (by up to 1.5x with 2 threads), so processes of both kinds take
turns and every turn starts afresh.

Run: python benchmarks/kernels/adamw_torch.py --bench BUILD/benchmarks/adamw_bench [--params N] [--turns N] [--threads 1
    2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from record import Record  # noqa: E402

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
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of a torch process, blocks of an adamw_bench process"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()

    record = Record(benchmark="kernels/adamw_torch", settings={"params": arguments.params, "steps": arguments.steps})
    for threads in arguments.threads:
        suffix = f", {threads} thread" + ("s" if threads > 1 else "")
        medians: dict[str, list[float]] = {"zeroth": [], "stream": [], "torch": []}
        for _ in range(arguments.turns):
            rows = zeroth_turn(arguments.bench, arguments.params, threads, arguments.steps)
            for key, name in (("zeroth", "adamw"), ("stream", "stream")):
                medians[key].append(rows[name + suffix])
            record.versions["torch"], times = torch_turn(arguments.params, threads, arguments.steps)
            medians["torch"].append(statistics.median(times))
        for key, values in medians.items():
            record.add(key + suffix, "ms", values, better="none" if key == "stream" else "lower")
        over_torch = [ours / theirs for ours, theirs in zip(medians["zeroth"], medians["torch"], strict=True)]
        record.add(f"zeroth / torch fused{suffix}", "ratio", over_torch, better="lower", bar=1.0)
    record.notes.append("a sample is the median of one process; processes of both kinds take turns")
    record.write(arguments.json)


if __name__ == "__main__":
    main()
