#!/usr/bin/env python3
"""Seconds to a loss over slow links: methods of Zeroth beside plain torch and DeepSpeed's 1-bit Adam, in one run.

  to_loss.py [--build DIR] [--python FILE] [--gbit 0.1 1 10 40] [--lr 1.25e-4 2.5e-4 5e-4] [--methods NAME...]
             [--steps N] [--rounds N] [--trained FILE] [--json FILE]

Two ranks, each on a host of its own (two_hosts.py), train one GPT from the same weights on the same batches of this
project's pages; all messages of all methods cross the same cable, as TCP, by gloo. Losses do not depend on the cable:
each method trains once a learning rate without a limit, and the rate with the lowest loss at the end is its own. Then
all methods take turns, blocks of steps over each speed of a token bucket. Seconds to a loss are the sum of
what those steps took. Bytes are counted at the cable. Needs root. Plain Python 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from record import Record  # noqa: E402
from two_hosts import TwoHosts  # noqa: E402

ROOT = HERE.parents[1]
SITE = ROOT / "build/links-site"
REQUIREMENTS = HERE / "requirements.txt"
METHODS = (
    "AdamW", "OneBitAdam", "ZeroOneAdam", "ZeRO++ gradients", "AdamW, stage 3", "ZeRO++, stage 3", "DiLoCo",
    "Streaming DiLoCo", "DDP", "DDP, fp16", "DDP, PowerSGD", "DeepSpeed OneBitAdam",
)  # fmt: skip
SAME_LOSSES = {"AdamW, stage 3": "AdamW"}
"""bit for bit, which tests show"""
LIKE_ADAMW = ("DDP", "DDP, fp16")
"""have its learning rate"""
SUMS_UNTIL_FREEZE = {"OneBitAdam": "AdamW", "DDP, PowerSGD": "DDP", "DeepSpeed OneBitAdam": "DeepSpeed, sums"}
"""until then they exchange sums of gradients, in steps like those of the other one"""
APART = ("DiLoCo", "Streaming DiLoCo")
WINDOWS = ("ZeroOneAdam", "DiLoCo", "Streaming DiLoCo")
"""whose steps differ: a block is a window"""
SMOOTH = 20
"""steps that a loss is the mean of"""
SAMPLE = 10
"""steps between two points of a curve"""
PERCENT = (2, 5)
"""targets: above what AdamW has at the end"""
LIMIT_S = 900.0
"""of one job"""
Rows = list[dict[str, Any]]


def install() -> None:
    """What methods.py needs beyond torch, once."""
    stamp = SITE / "installed.txt"
    wanted = REQUIREMENTS.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(SITE)]
    builds = subprocess.run([*pip, "setuptools", "wheel"], check=False).returncode == 0  # what DeepSpeed is built with
    paths = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))
    command = [*pip, "--no-build-isolation", "-r", str(REQUIREMENTS)]
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PYTHONPATH": paths}
    if builds and subprocess.run(command, env=environment, check=False).returncode == 0:
        stamp.write_text(wanted, encoding="utf-8")


class Job:
    """Two ranks on two hosts."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        names = ("steps", "block", "layers", "width", "batch", "length", "freeze", "warmup", "window")
        self.options = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]

    def run(self, lr: float, *words: str) -> Any:
        """What rank 0 reports. Raises RuntimeError with what a rank has said if one fails."""
        given = self.given
        with TwoHosts() as hosts, tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report.json")
            paths = [str(given.build / "python"), str(HERE), str(SITE), os.environ.get("PYTHONPATH", "")]
            common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            common |= {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
            common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            common |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [str(given.python), str(HERE / "to_loss_rank.py"), "--report", str(report), "--lr", str(lr)]
            files = [open(pathlib.Path(folder, f"rank{rank}"), "w+") for rank in (0, 1)]
            ranks = [
                subprocess.Popen(
                    [*hosts.inside(rank), *command, *words, *self.options],
                    env=common | {"RANK": str(rank)},
                    stdout=sys.stderr if rank == 0 and "--time" in words else file,
                    stderr=file,
                )
                for rank, file in enumerate(files)
            ]
            deadline = time.monotonic() + LIMIT_S
            while any(rank.poll() is None for rank in ranks):
                if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
                    time.sleep(2)  # the other one may say why
                    for rank in ranks:
                        rank.kill()
                time.sleep(0.1)
            texts = []
            for file in files:
                file.seek(0)
                texts.append(file.read())
                file.close()
            if any(rank.returncode for rank in ranks):
                lines = [line for text in texts for line in text.splitlines() if "Error" in line or "what()" in line]
                raise RuntimeError(lines[-1] if lines else "\n".join(texts)[-300:])
            return json.loads(report.read_text())


def smooth(rows: Rows, step: int) -> float:
    """Mean loss of the window that ends with the step, from 0."""
    window = rows[max(0, step + 1 - SMOOTH) : step + 1]
    return float(sum(row["loss"] for row in window) / len(window))


@dataclasses.dataclass(kw_only=True)
class Times:
    """Of one speed of the link: what the blocks of all methods took."""

    blocks: dict[str, list[dict[str, Any]]]
    freeze: int

    def late(self, name: str) -> list[float]:
        return [block["seconds"] for block in self.blocks[name]]

    def steps(self, name: str, rows: Rows) -> list[float]:
        """Seconds of each step of a run."""
        late = statistics.median(self.late(name))
        if name in SUMS_UNTIL_FREEZE:
            early = statistics.median(self.late(SUMS_UNTIL_FREEZE[name]))
            return [early if step < self.freeze else late for step in range(len(rows))]
        if name != "ZeroOneAdam":
            return [late] * len(rows)
        each = [step for block in self.blocks[name] for step in block["each"]]
        silent = statistics.median(seconds for seconds, counted in each if counted == 0)
        signs = statistics.median(seconds for seconds, counted in each if counted > 0)
        sums = statistics.median(self.late("AdamW"))
        most = max(row["counted"] for row in rows)
        return [sums if 2 * row["counted"] > most else signs if row["counted"] > 0 else silent for row in rows]


def take_turns(job: Job, record: Record, names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Blocks of all rounds. Of a round sites that train apart have jobs of their own, a method each; every second round
    goes backwards. A job that fails is left out."""
    found: dict[str, Any] = {"blocks": {}, "gbits": {}}
    for number in range(given.rounds):
        jobs = [[name for name in names if name not in APART], *([name] for name in names if name in APART)]
        for together in jobs:
            order = -1 if number % 2 else 1
            windows = [name for name in WINDOWS if name in together]
            words = ["--time", *together[::order], "--windows", *windows]
            words += ["--gbit", *(f"{gbit:g}" for gbit in given.gbit[::order])]
            if not together:
                continue
            try:
                one = job.run(given.lr[0], *words)
            except RuntimeError as error:
                record.failures[f"round {number}, {', '.join(together)}"] = str(error)
                continue
            for gbit, of_speed in one["blocks"].items():
                for name, blocks in of_speed.items():
                    found["blocks"].setdefault(gbit, {}).setdefault(name, []).extend(blocks)
            for gbit, moved in one["gbits"].items():
                found["gbits"].setdefault(gbit, []).extend(moved)
    return found


def add_losses(record: Record, runs: dict[str, Rows], rates: dict[str, float], freeze: int) -> None:
    for name, rows in runs.items():
        record.add(f"{name}: loss at the end", "nats", [smooth(rows, len(rows) - 1)], "lower")
        record.add(f"{name}: learning rate", "1", [rates[name]])
        late = rows[freeze + SMOOTH :]
        mean = {
            field: sum(row[field] for row in late) / len(late) / 1e6 for field in ("received", "counted", "planned")
        }
        record.add(f"{name}: MB a late step, at the cable", "MB", [mean["received"]], "lower")
        if late[0]["counted"] >= 0:
            record.add(f"{name}: MB a late step, by the formula", "MB", [mean["planned"]], "lower")
            # An exchange that has come may be taken later.
            under_way = abs(sum(row["counted"] - row["planned"] for row in rows))
            if under_way > (max(row["planned"] for row in rows) if name == "Streaming DiLoCo" else 0):
                record.failures[f"{name}: counted bytes are those of the formula"] = "they are not"
        record.add(f"{name}: MB of the run, at the cable", "MB", [sum(row["received"] for row in rows) / 1e6], "lower")


def add_times(record: Record, runs: dict[str, Rows], times: dict[str, Times]) -> None:
    end = smooth(runs["AdamW"], len(runs["AdamW"]) - 1)
    seconds: dict[str, dict[str, list[float]]] = {}
    for gbit, of_speed in times.items():
        for name in of_speed.blocks:
            record.add(f"{gbit} Gbit/s, {name}: step", "ms", [1e3 * one for one in of_speed.late(name)], "lower")
            cpu = [1e3 * block["cpu"] for block in of_speed.blocks[name]]
            record.add(f"{gbit} Gbit/s, {name}: CPU of a step", "ms", cpu, "lower")
        for name, rows in runs.items():
            if name not in of_speed.blocks:
                continue
            passed, total = [], 0.0
            for one in of_speed.steps(name, rows):
                total += one
                passed.append(total)
            seconds.setdefault(gbit, {})[name] = [round(one, 3) for one in passed[SAMPLE - 1 :: SAMPLE]]
            for percent in PERCENT:
                target = (1 + percent / 100) * end
                reached = (step for step in range(SMOOTH - 1, len(rows)) if smooth(rows, step) <= target)
                step = next(reached, None)
                row = f"{gbit} Gbit/s, {name}: seconds to {percent} % above AdamW's last loss"
                if step is None:
                    record.failures[row] = "the loss did not come there"
                else:
                    record.add(row, "s", [passed[step]], "lower")
    record.settings["seconds"] = seconds
    losses = {
        name: [round(smooth(rows, i), 4) for i in range(SAMPLE - 1, len(rows), SAMPLE)] for name, rows in runs.items()
    }
    record.settings["losses"] = losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=ROOT / "build/venv/bin/python")
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1.0, 10.0, 40.0])
    parser.add_argument("--lr", type=float, nargs="+", default=[1.25e-4, 2.5e-4, 5e-4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    numbers = {"steps": 300, "rounds": 5, "block": 4, "layers": 2, "width": 512, "batch": 2, "length": 32}
    numbers |= {"freeze": 60, "warmup": 20, "window": 20}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--trained", type=pathlib.Path, help="file for the losses; those that are in it are not made again"
    )
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    given.build, given.python = given.build.absolute(), given.python.absolute()
    install()
    record = Record(benchmark="links/to_loss")
    record.settings |= {name: getattr(given, name) for name in ("gbit", "lr", *numbers)}
    job = Job(given)
    kept: dict[str, Rows] = json.loads(given.trained.read_text()) if given.trained and given.trained.is_file() else {}
    runs: dict[str, Rows] = {}
    rates: dict[str, float] = {}
    for name in given.methods:
        if name in SAME_LOSSES:
            continue
        for lr in [rates["AdamW"]] if name in LIKE_ADAMW and "AdamW" in rates else given.lr:
            print(f"{name}, learning rate {lr:g}", file=sys.stderr, flush=True)
            key = f"{name}, {lr:g}"
            try:
                rows = kept.get(key) or job.run(lr, "--train", name)
            except RuntimeError as error:
                record.failures[key] = str(error)
                continue
            kept[key] = rows
            if given.trained:
                given.trained.write_text(json.dumps(kept))
            if name not in runs or smooth(rows, len(rows) - 1) < smooth(runs[name], len(rows) - 1):
                runs[name], rates[name] = rows, lr
    timed = [name for name in given.methods if name in runs or name in SAME_LOSSES]
    timed += [name for name in ("DeepSpeed, sums",) if "DeepSpeed OneBitAdam" in runs]
    found = take_turns(job, record, timed, given)
    times = {gbit: Times(blocks=blocks, freeze=given.freeze) for gbit, blocks in found["blocks"].items()}
    add_losses(record, runs, rates, given.freeze)
    for gbit, moved in found["gbits"].items():
        record.add(f"{gbit} Gbit/s: what gloo moves in an all-reduce of 8 MiB", "Gbit/s", moved, "higher")
    runs |= {name: runs[same] for name, same in SAME_LOSSES.items() if name in timed and same in runs}
    add_times(record, runs, times)
    record.notes.append(f"losses are means over {SMOOTH} steps and both sites; bytes are those that a rank receives")
    record.notes.append("at the cable: with the headers of all packets, and what the library says beside its data")
    record.count_foreign()
    record.write(given.json)


if __name__ == "__main__":
    main()
