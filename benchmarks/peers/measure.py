"""Measures one cell: every contestant alone, all of them in paired blocks, and their starts."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import ranks
from cells import BARE, Cell, Entry
from places import Places
from ranks import Failed

MEMORY_SHARE = 0.6  # of the machine's, for a job with several contestants

Block = dict[str, float]
"""seconds a step, as job.py's"""
Pair = tuple[Block, Block]
"""a contestant's and the floor's, of the same cycle"""


@dataclasses.dataclass(kw_only=True)
class Solo:
    """A job with one contestant."""

    reports: list[dict[str, Any]]
    """of solo.py's ranks"""
    peak_pss: int

    @property
    def own_bytes(self) -> int:
        """What all ranks took beyond their start; for planning only."""
        imported: int = sum(report["pss_imported"] for report in self.reports)
        return max(0, self.peak_pss - imported)


def plan_jobs(entries: list[Entry], own_bytes: dict[str, int], budget: float) -> Iterator[list[str]]:
    """Contestants that take turns in one job: those of a group, the floor first, as many as fit into the budget."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        if entry.name != "floor":
            groups.setdefault(entry.group, []).append(entry.name)
    for names in groups.values():
        job, used = ["floor"], own_bytes["floor"]
        for name in names:
            if len(job) > 1 and used + own_bytes[name] > budget:
                yield job
                job, used = ["floor"], own_bytes["floor"]
            job.append(name)
            used += own_bytes[name]
        yield job


class Measurement:
    """Of one cell. What fails is taken out of what follows and named in `failures`."""

    def __init__(self, cell: Cell, entries: list[Entry], places: Places) -> None:
        self.cell = cell
        self.entries = entries
        self.places = places
        self.solo: dict[str, Solo] = {}
        self.pairs: dict[str, list[Pair]] = collections.defaultdict(list)
        """one for each cycle"""
        self.startup: dict[str, list[float]] = collections.defaultdict(list)
        """seconds until step 1 has ended on all ranks, one for each round"""
        self.jobs: list[list[str]] = []
        self.failures: dict[str, str] = {}
        self.notes: list[str] = []

    def run(self) -> None:
        for entry in self.entries:
            self._run_solo(entry.name)
        self._run_all_paired()
        starters = [BARE.name, *self.solo]
        for number in range(self.cell.startup_rounds):
            for name in starters if number % 2 == 0 else reversed(starters):
                self._run_startup(name)

    def _say(self, text: str) -> None:
        print(f"{self.cell.name}: {text}", file=sys.stderr, flush=True)

    def _fail(self, name: str, what: str, failure: Failed) -> None:
        self.failures[f"{name}, {what}"] = str(failure)
        self._say(f"{name} failed, {what}: {failure}")

    def _rank_files(self) -> list[str]:
        return [f"rank{rank}.json" for rank in range(self.cell.ranks)]

    def _run_solo(self, name: str) -> None:
        self._say(f"{name} alone")
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            command = ranks.launched(self.places, self.cell, "solo.py", ["--contestant", name, "--report", report])
            try:
                ended = ranks.run(command, self.places, folder, self._rank_files(), sample=True)
            except Failed as failure:
                self._fail(name, "alone", failure)
                return
            self._note_late(name, ended)
            self.solo[name] = Solo(reports=self._read_ranks(folder), peak_pss=ended.peak_pss)

    def _run_all_paired(self) -> None:
        able = [entry for entry in self.entries if entry.name in self.solo]
        if "floor" not in self.solo:
            for entry in able:
                self._fail(entry.name, "in paired blocks", Failed("there is no floor"))
            return
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        own_bytes = {name: solo.own_bytes for name, solo in self.solo.items()}
        for names in plan_jobs(able, own_bytes, MEMORY_SHARE * memory):
            self._run_paired(names)

    def _run_paired(self, names: list[str]) -> None:
        """Again without the one that fails, until all others have their blocks."""
        self._say("taking turns: " + ", ".join(names))
        culprit = self._try_job(names)
        rest = [name for name in names if name != culprit]
        if culprit == "floor":
            for name in rest:
                self._fail(name, "in paired blocks", Failed("the floor beside it failed"))
        elif culprit is not None and len(rest) > 1:
            self._run_paired(rest)

    def _try_job(self, names: list[str]) -> str | None:
        """Who failed."""
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            words = ["--contestants", ",".join(names), "--report", report]
            try:
                ended = ranks.run(
                    ranks.launched(self.places, self.cell, "job.py", words), self.places, folder, ["blocks.json"]
                )
            except Failed as failure:
                culprit = ranks.at_work(folder) or "floor"
                self._fail(culprit, "in paired blocks", failure)
                return culprit
            self._note_late(", ".join(names), ended)
            self._take_blocks(names, json.loads((folder / "blocks.json").read_text(encoding="utf-8")))
        return None

    def _take_blocks(self, names: list[str], blocks: dict[str, dict[str, Any]]) -> None:
        self.jobs.append([f"{name} x {blocks[name]['block_steps']}" for name in names])
        for name in names:
            self.pairs[name] += zip(blocks[name]["cycles"], blocks["floor"]["cycles"])

    def _run_startup(self, name: str) -> None:
        self._say(f"start of {name}")
        contestant = "floor" if name == BARE.name else name
        with tempfile.TemporaryDirectory() as report:
            folder = pathlib.Path(report)
            words = ["--contestant", contestant, "--report", report, "--startup"]
            commands = ranks.bare if name == BARE.name else ranks.launched
            try:
                ended = ranks.run(
                    commands(self.places, self.cell, "solo.py", words), self.places, folder, self._rank_files()
                )
            except Failed as failure:
                self._fail(name, "start-up", failure)
                return
            ends = [report["step_1_end"] for report in self._read_ranks(folder)]
            self.startup[name].append(max(ends) - ended.started)

    def _read_ranks(self, folder: pathlib.Path) -> list[dict[str, Any]]:
        return [json.loads((folder / name).read_text(encoding="utf-8")) for name in self._rank_files()]

    def _note_late(self, who: str, ended: ranks.Ended) -> None:
        if ended.late_failure:
            self.notes.append(f"{who}: after all results were written: {ended.late_failure}")
