#!/usr/bin/env python3
"""One layer of experts, forward and backward, beside peers: zeroth.nn.MoE, a loop of plain torch, DeepSpeed's MoE.

  layer.py [--ranks 1|2] [--width 512] [--tokens 2048] [--experts 8] [--cycles N] [--build DIR] [--python FILE]
           [--names NAME ...] [--json FILE]

k = 2, experts of two matrices (width to 4 width and back, with biases and ReLU), float32, one thread a rank, the same
router and experts for all. "own forward": an expert of which only the forward is known; else a stack of layers, which
zeroth.nn.Experts computes together. "capacity": an expert takes 1.25 times its share. With 2 ranks experts are shared
over them (ep = 2); the loop has no such form. The layers take turns in one run, and each ratio is of one turn. Peak
bytes are those of torch's allocator in a step, above what the layer holds before it (support/live_bytes.py), gradients
included; peak resident is what of the process was in memory, which leaves out pages that nobody has touched yet.
Received bytes are those of a step's exchanges of tokens.

DeepSpeed is looked for where links/to_loss.py installs it, build/links-site. Plain Python 3.
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
SITE = ROOT / "build/links-site"
sys.path.insert(0, str(HERE.parent / "support"))
from record import Record, program  # noqa: E402

NAMES = {
    1: ["zeroth", "zeroth, own forward", "loop", "deepspeed", "zeroth, capacity", "deepspeed, capacity"],
    2: ["zeroth", "zeroth, own forward", "deepspeed", "zeroth, capacity", "deepspeed, capacity"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=ROOT / "build/venv/bin/python")
    parser.add_argument("--ranks", type=int, choices=NAMES, default=1)
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--names", nargs="+", help="contestants; without it all that are there")
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    names = given.names or [one for one in NAMES[given.ranks] if SITE.is_dir() or "deepspeed" not in one]
    record = Record(benchmark="moe/layer")
    record.settings |= {key: getattr(given, key) for key in ("ranks", "tokens", "width", "experts", "cycles")}
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "result")
        sizes = [word for key in ("cycles", "tokens", "width", "experts") for word in (f"--{key}", getattr(given, key))]
        command = [program(given.build.absolute(), "zeroth-run"), "-q", "--no-prefix", "-n", given.ranks]
        command += [given.python, HERE / "layer_rank.py", *names, *sizes, "--result", result]
        paths = [str(given.build.absolute() / "python"), str(SITE), os.environ.get("PYTHONPATH", "")]
        # As in peers/places.py: with LOCAL_SIZE DeepSpeed writes to /dev/shm for an operation that is not used here.
        environment = {name: value for name, value in os.environ.items() if name != "LOCAL_SIZE"} | {
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        if subprocess.run([str(word) for word in command], env=environment, check=False).returncode != 0:
            sys.exit("layer.py: the ranks failed")
        found = json.loads(result.read_text(encoding="utf-8"))
    record.versions |= found["versions"]
    cycles = found["cycles"]
    for kind in ("wall", "cpu"):
        for name in names:
            record.add(f"{name}: {kind}", "ms", [1000 * cycle[name][kind] for cycle in cycles], "lower")
    for name in names:
        for peer in names:
            alike = ("capacity" in name) == ("capacity" in peer)
            if name.startswith("zeroth") and not peer.startswith("zeroth") and alike:
                ratios = [cycle[name]["wall"] / cycle[peer]["wall"] for cycle in cycles]
                record.add(f"{name} / {peer}: wall", "ratio", ratios, "lower")
    titles = {"peak": "peak bytes", "resident": "peak resident", "received": "received bytes"}
    for key, title in titles.items():
        for name in names:
            record.add(f"{name}: {title}", "MiB", [one / 2**20 for one in found["facts"][name][key]], "lower")
    record.notes += found["notes"]
    record.count_foreign()
    record.write(given.json)


if __name__ == "__main__":
    main()
