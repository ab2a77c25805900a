#!/usr/bin/env python3
"""A stack of GPT-2's blocks in two stages, by Zeroth and its peers, with one schedule: step, bubble, start-up, memory.

  pipeline.py PART [--build DIR] [--python FILE] [--cycles N] [--layers 8] [--width 512] [--tokens 256] [--micro 8]
              [--startup-rounds N] [--block-seconds S] [--trainers NAME ...] [--json FILE]

PART: 1f1b, gpipe, interleaved, zero-bubble (setups.py). float32, a sequence a micro-batch, 2 ranks with a thread each,
AdamW, no clipping. Each trainer runs alone first (alone.py), once for its peak PSS and once for its bytes; those that
can take turns in one job (turns.py). What fails is named in the result. Peers: torch.distributed.pipelining and
DeepSpeed's PipelineEngine over gloo, installed as peers/ says. Plain Python 3.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "peers")]
import ideal  # noqa: E402
import ranks  # noqa: E402
from places import Places, find_places  # noqa: E402
from record import Record  # noqa: E402
from setups import PARTS, STAGES, Work  # noqa: E402

RANK_FILES = [f"rank{rank}.json" for rank in range(STAGES)]
MB = 1e6


class Measurement:
    """What fails is taken out of what follows and named in `failures`."""

    def __init__(self, work: Work, places: Places, names: list[str]) -> None:
        self.work = work
        self.places = places
        self.names = names
        self.alone: dict[str, list[dict[str, Any]]] = {}
        """reports of the ranks"""
        self.pss: dict[str, int] = {}
        self.startup: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        """seconds from the launcher's start, and from the construction, until step 1 has ended on all ranks"""
        self.turns: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.notes: list[str] = []

    def run(self, cycles: int, block_seconds: float, startup_rounds: int) -> None:
        for name in self.names:
            self._run_alone(name)
        able = [name for name in self.names if name in self.alone]
        self._run_turns(able, cycles, block_seconds)
        for number in range(startup_rounds):
            for name in able if number % 2 == 0 else reversed(able):
                self._run_startup(name)

    def _say(self, text: str) -> None:
        print(f"pipeline, {self.work.part}: {text}", file=sys.stderr, flush=True)

    def _fail(self, name: str, what: str, failure: ranks.Failed) -> None:
        self.failures[f"{name}, {what}"] = str(failure)
        self._say(f"{name} failed, {what}: {failure}")

    def _command(self, program: str, words: list[str]) -> list[list[str]]:
        launcher = [str(self.places.launcher), "-q", "--no-prefix", "-n", str(STAGES), str(self.places.python)]
        return [[*launcher, str(HERE / program), "--work", self.work.to_json(), *words]]

    def _run_alone(self, name: str) -> None:
        self._say(f"{name} alone")
        for end in ("steps", "bytes"):  # the tools that look at bytes take memory of their own
            with tempfile.TemporaryDirectory() as report:
                folder = pathlib.Path(report)
                command = self._command("alone.py", ["--trainer", name, "--report", report, "--end", end])
                try:
                    ended = ranks.run(command, self.places, folder, RANK_FILES, sample=end == "steps")
                except ranks.Failed as failure:
                    self._fail(name, "alone", failure)
                    return
                self._note_late(name, ended)
                if end == "steps":
                    self.pss[name] = ended.peak_pss
                else:
                    self.alone[name] = read_ranks(folder)

    def _run_turns(self, names: list[str], cycles: int, block_seconds: float) -> None:
        """Again without the one that fails, until all others have their blocks."""
        if "floor" not in names:
            return
        self._say("taking turns: " + ", ".join(names))
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            words = ["--trainers", ",".join(names), "--report", report, "--cycles", str(cycles)]
            command = self._command("turns.py", [*words, "--block-seconds", str(block_seconds)])
            try:
                ended = ranks.run(command, self.places, folder, ["blocks.json"])
            except ranks.Failed as failure:
                culprit = ranks.at_work(folder) or "floor"
                self._fail(culprit, "in turns", failure)
            else:
                self._note_late(", ".join(names), ended)
                self.turns = json.loads((folder / "blocks.json").read_text(encoding="utf-8"))
                return
        rest = [name for name in names if name != culprit]
        if len(rest) > 1:
            self._run_turns(rest, cycles, block_seconds)

    def _run_startup(self, name: str) -> None:
        self._say(f"start of {name}")
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            command = self._command("alone.py", ["--trainer", name, "--report", report, "--end", "step-1"])
            try:
                ended = ranks.run(command, self.places, folder, RANK_FILES)
            except ranks.Failed as failure:
                self._fail(name, "start-up", failure)
                return
            found = read_ranks(folder)
            whole = max(one["step_1_end"] for one in found) - ended.started
            self.startup[name].append((whole, max(one["construction"] for one in found)))

    def _note_late(self, who: str, ended: ranks.Ended) -> None:
        if ended.late_failure:
            self.notes.append(f"{who}: after all results were written: {ended.late_failure}")


def read_ranks(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads((folder / name).read_text(encoding="utf-8")) for name in RANK_FILES]


def ideal_steps(work: Work, turns: dict[str, Any]) -> list[tuple[float, float]]:
    """Of each cycle: seconds of a step in which nothing but the schedule makes a rank wait, and the share of it that
    ranks wait."""
    found = []
    for cycle in turns["cycles"]:
        times = cycle["floor"]["times"]
        chunks = {key: value / work.micro_batches for one in times for key, value in one.items() if key != "U"}
        step = ideal.step_seconds(turns["program"], chunks, [one["U"] for one in times])
        found.append((step, 1 - statistics.mean(sum(one.values()) for one in times) / step))
    return found


def add_turns(record: Record, work: Work, turns: dict[str, Any]) -> None:
    cycles = turns["cycles"]
    names = [name for name in cycles[0] if name != "floor"]
    best = ideal_steps(work, turns)
    record.add("floor: step", "ms", [1e3 * cycle["floor"]["wall"] for cycle in cycles], "lower")
    record.add("ideal: step", "ms", [1e3 * step for step, _ in best])
    record.add("ideal: bubble", "%", [100 * bubble for _, bubble in best])
    for name in names:
        own = [cycle[name] for cycle in cycles]
        record.add(f"{name}: step", "ms", [1e3 * one["wall"] for one in own], "lower")
        record.add(f"{name}: cpu", "ms", [1e3 * one["cpu"] for one in own], "lower")
        over = [one["wall"] / step for one, (step, _) in zip(own, best, strict=True)]
        record.add(f"{name}: step over ideal", "ratio", over, "lower")
        waits = [1 - statistics.mean(one["timed"]["computes"]) / one["timed"]["wall"] for one in own]
        record.add(f"{name}: bubble", "%", [100 * share for share in waits], "lower")
        computes = [statistics.mean(sum(one.values()) for one in cycle["floor"]["times"]) for cycle in cycles]
        beyond = [1 - floor / one["wall"] for one, floor in zip(own, computes, strict=True)]
        record.add(f"{name}: beyond computation", "%", [100 * share for share in beyond], "lower")
    for peer in (name for name in names if "zeroth" in names and name != "zeroth"):
        ratios = [cycle["zeroth"]["wall"] / cycle[peer]["wall"] for cycle in cycles]
        record.add(f"zeroth over {peer}: step", "ratio", ratios, "lower", 1.0)


def add_alone(record: Record, measured: Measurement) -> None:
    for name, reports in measured.alone.items():
        for field, what in (("saved", "activations"), ("allocated", "allocated in a step")):
            own = [report[field] / MB for report in reports]
            record.add(f"{name}: {what}, largest rank", "MB", [max(own)], "lower")
            record.add(f"{name}: {what}, all ranks", "MB", [sum(own)], "lower")
        record.add(f"{name}: peak PSS, all ranks", "MB", [measured.pss[name] / MB], "lower")
    for name, times in measured.startup.items():
        record.add(f"{name}: start-up", "s", [whole for whole, _ in times], "lower")
        record.add(f"{name}: construction and step 1", "s", [own for _, own in times], "lower")
    if "floor" in measured.alone and measured.turns:
        # A chunk at a time: the floor holds one micro-batch of the chunk that has most.
        held = ideal.held(measured.turns["program"])
        own = [count * report["saved"] / MB for count, report in zip(held, measured.alone["floor"], strict=True)]
        record.add("ideal: activations, largest rank", "MB", [max(own)])
        record.add("ideal: activations, all ranks", "MB", [sum(own)])


def losses_note(alone: dict[str, list[dict[str, Any]]]) -> str:
    """Losses of the same step; the floor trains another thing."""
    found = {}
    for name, reports in alone.items():
        known = [report["loss"] for report in reports if report["loss"] == report["loss"]]
        if name != "floor" and known:
            found[name] = known[-1]
    told = ", ".join(f"{name} {loss:.6f}" for name, loss in found.items())
    same = all(abs(loss - other) < 1e-3 for loss in found.values() for other in found.values())
    return f"losses of the same step: {told}" if same else f"OTHER LOSSES: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parents[1] / "build/release")
    parser.add_argument("--python", type=pathlib.Path, default=HERE.parents[1] / "build/venv/bin/python")
    parser.add_argument("--cycles", type=int, default=8)
    for name, value in (("layers", 8), ("width", 512), ("tokens", 256), ("micro", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--startup-rounds", type=int, default=5)
    parser.add_argument("--block-seconds", type=float, default=2.0)
    parser.add_argument("--trainers", nargs="+", help="names; default: all that have the schedule")
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    work = Work(part=given.part, layers=given.layers, width=given.width, tokens=given.tokens, micro_batches=given.micro)
    names = [name for name in work.setup.trainers() if name == "floor" or name in (given.trainers or [name])]
    places = find_places(given.build.absolute(), given.python.absolute())
    record = Record(benchmark="pipeline/step")
    measured = Measurement(work, places, names)
    measured.run(given.cycles, given.block_seconds, given.startup_rounds)
    reports = [report for one in measured.alone.values() for report in one]
    record.versions |= reports[0]["versions"] if reports else {}
    record.settings |= {
        "part": work.part,
        "schedule": work.setup.schedule,
        "torch_schedule": work.setup.torch,
        "stages": STAGES,
        "chunks": work.setup.chunks,
        "micro_batches": work.micro_batches,
        "layers": work.layers,
        "width": work.width,
        "tokens": work.tokens,
        "parameters": sum(report["parameters"] for report in measured.alone.get("floor", [])),
        "cycles": given.cycles,
        "block_steps": measured.turns.get("block_steps", {}),
    }
    if measured.turns:
        add_turns(record, work, measured.turns)
    add_alone(record, measured)
    record.failures |= measured.failures
    record.notes += [losses_note(measured.alone), *measured.notes]
    record.count_foreign()
    record.write(given.json)
    if "zeroth" not in measured.turns.get("block_steps", {}):
        sys.exit("pipeline.py: Zeroth's own ranks failed")


if __name__ == "__main__":
    main()
