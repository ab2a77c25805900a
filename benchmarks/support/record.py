"""Results of the Python benchmarks, as schema.json has them. Plain Python 3."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import random
import statistics
import sys
from typing import Any


def median_interval(values: list[float], draws: int = 4000) -> tuple[float, float, float]:
    """Median and its 95 % percentile-bootstrap interval (fixed seed)."""
    source = random.Random(1)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[draws // 40], medians[draws - 1 - draws // 40]


def cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def busy_seconds() -> float:
    """Seconds that all cores together were not idle since the machine started."""
    fields = pathlib.Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    ticks = sum(int(value) for index, value in enumerate(fields) if index not in (3, 4))
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def program(build: pathlib.Path, name: str) -> pathlib.Path:
    """zeroth-run or zeroth-gpt of a build: below it, or beside it, where the release preset puts them."""
    for folder in (build / "bin", build.parent / "bin"):
        if (folder / name).is_file():
            return folder / name
    sys.exit(f"there is no {name} in {build / 'bin'} or {build.parent / 'bin'}; build it first")


def text_of(result: dict[str, Any]) -> str:
    """As a file: a line for each row, and for each member of what else has members. As Record::text() in C++."""
    parts = []
    for name, value in result.items():
        if isinstance(value, dict):
            lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        elif isinstance(value, list):
            lines = [json.dumps(item) for item in value]
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
            continue
        first, last = "{}" if isinstance(value, dict) else "[]"
        inside = "\n    " + ",\n    ".join(lines) + "\n  " if lines else ""
        parts.append(f"  {json.dumps(name)}: {first}{inside}{last}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@dataclasses.dataclass(kw_only=True)
class Record:
    benchmark: str
    """folder/name"""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: {"python": platform.python_version()})
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    command: str = dataclasses.field(default_factory=lambda: " ".join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]))
    date: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    )
    load_before: float = dataclasses.field(default_factory=lambda: os.getloadavg()[0])
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """why rows are not there: contestant, and what of it -> reason"""
    foreign_before: float = dataclasses.field(default_factory=lambda: busy_seconds() - own_seconds())
    foreign_cpu_seconds: float | None = None

    def add(self, name: str, unit: str, values: list[float], better: str = "none", bar: float | None = None) -> None:
        """A row from samples."""
        median, low, high = median_interval(values)
        row = {"name": name, "unit": unit, "median": median, "low": low, "high": high}
        row |= {"samples": len(values), "better": better}
        if bar is not None:
            row["bar"] = bar
        self.rows.append(row)

    def count_foreign(self) -> None:
        """What others spent since this record was made; all that belongs to the run has ended."""
        self.foreign_cpu_seconds = max(0.0, busy_seconds() - own_seconds() - self.foreign_before)

    def to_dict(self) -> dict[str, Any]:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        machine = {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": memory,
            "kernel": platform.release(),
            "load_before": self.load_before,
            "load_after": os.getloadavg()[0],
        }
        if self.foreign_cpu_seconds is not None:
            machine["foreign_cpu_seconds"] = self.foreign_cpu_seconds
        result = {
            "schema": 1,
            "benchmark": self.benchmark,
            "date": self.date,
            "command": self.command,
            "machine": machine,
            "versions": self.versions,
            "settings": self.settings,
            "rows": self.rows,
            "notes": self.notes,
        }
        return result | ({"failures": self.failures} if self.failures else {})

    def write(self, path: str | None) -> None:
        """Prints the rows and writes the file, if one is named."""
        width = max((len(row["name"]) for row in self.rows), default=0)
        for row in self.rows:
            bar = f"  bar {row['bar']:g}" if "bar" in row else ""
            print(
                f"{row['name']:<{width}} {row['median']:12,.3f} {row['unit']:<6} "
                f"[{row['low']:,.3f}, {row['high']:,.3f}] of {row['samples']}{bar}"
            )
        for name, reason in self.failures.items():
            print(f"FAILED: {name}: {reason}")
        for note in self.notes:
            print(f"note: {note}")
        if path:
            pathlib.Path(path).write_text(text_of(self.to_dict()), encoding="utf-8")
