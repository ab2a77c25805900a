#!/usr/bin/env python3
"""Writes the tables of pipelines in docs/performance.md from the committed results.

table.py            prints them
table.py --page     writes them into the page

Plain Python 3.
"""

from __future__ import annotations

import json
import pathlib
import sys
import textwrap
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import pages  # noqa: E402
from setups import PARTS, TITLES  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- pipelines -->", "<!-- end of pipelines -->"
BUSY_LOAD = 1.0
"""a machine whose load before the run is above it had other work"""
Result = dict[str, Any]

COLUMNS = [
    ("step, ms", "step", 1, True),
    ("over ideal", "step over ideal", 3, True),
    ("bubble, %", "bubble", 1, True),
    ("beyond computation, %", "beyond computation", 1, True),
    ("activations, MB", "activations, largest rank", 2, False),
    ("allocated in a step, MB", "allocated in a step, largest rank", 1, False),
    ("peak PSS, all ranks, MB", "peak PSS, all ranks", 0, False),
    ("construction and step 1, s", "construction and step 1", 2, False),
    ("start-up, s", "start-up", 2, False),
]
"""title, row, digits, whether the interval is told"""


def cell(result: Result, row_name: str, digits: int, interval: bool) -> str:
    for row in result["rows"]:
        if row["name"] == row_name:
            told = f"{row['median']:,.{digits}f}"
            return f"{told} [{row['low']:,.{digits}f}, {row['high']:,.{digits}f}]" if interval else told
    return ""


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def about(result: Result) -> str:
    """When, and whether on idle cores."""
    load = result["machine"]["load_before"]
    busy = f", **busy machine** (load {load:.1f} before the run)" if load > BUSY_LOAD else ""
    return f"{result['date'][:10]}{busy}"


def steps(result: Result) -> str:
    """Of one schedule: a line a trainer."""
    settings = result["settings"]
    names = [name for name in TITLES if any(row["name"].startswith(f"{name}: ") for row in result["rows"])]
    lines = [["ideal", *(cell(result, f"ideal: {row}", digits, told) for _, row, digits, told in COLUMNS)]]
    for name in names:
        lines.append(
            [TITLES[name], *(cell(result, f"{name}: {row}", digits, told) for _, row, digits, told in COLUMNS)]
        )
    text = textwrap.fill(
        f"`{settings['schedule']}`, {settings['stages']} stages of {settings['chunks']} "
        f"chunk{'s' if settings['chunks'] > 1 else ''}, {settings['micro_batches']} micro-batches of "
        f"{settings['tokens']} tokens, {settings['parameters'] / 1e6:.1f} million parameters, "
        f"{settings['cycles']} cycles; {about(result)}:",
        width=120,
        break_on_hyphens=False,
    )
    text += "\n\n" + markdown(["", *(title for title, *_ in COLUMNS)], lines)
    failures = [f"- {who}: failed: {reason}\n" for who, reason in result.get("failures", {}).items()]
    return text + ("\n" + "".join(failures) if failures else "")


def actions(result: Result) -> str:
    settings = result["settings"]
    names = [row["name"].split(":")[0] for row in result["rows"] if row["name"].endswith(": an action")]
    lines = [
        [
            TITLES[name],
            cell(result, f"{name}: step", 2, True),
            cell(result, f"{name}: an action", 1, True),
        ]
        for name in names
    ]
    floor = ["floor", cell(result, "floor: step", 2, True), ""]
    return (
        f"Two linears of 8 x 8, {settings['micro_batches']} micro-batches, {settings['actions']} actions a rank; "
        f"{about(result)}:\n\n" + markdown(["", "step, ms", "us an action"], [floor, *lines])
    )


def sleeping(result: Result) -> str:
    settings = result["settings"]
    names = [row["name"].split(":")[0] for row in result["rows"] if row["name"].endswith(": bubble")]
    lines = [
        [
            name,
            cell(result, f"{name}: simulated bubble", 2, False),
            cell(result, f"{name}: bubble", 2, True),
            cell(result, f"{name}: apart", 2, False),
        ]
        for name in names
    ]
    return (
        f"{settings['micro_batches']} micro-batches, F, I and W sleep {settings['times_ms']} ms; {about(result)}:\n\n"
        + markdown(["", "simulated, %", "measured, %", "apart, points"], lines)
    )


def tables(results: pathlib.Path) -> str:
    makers = {f"pipeline-{name}": steps for name in PARTS}
    makers |= {"pipeline-actions": actions, "pipeline-sleeping": sleeping}
    parts = []
    for name, make in makers.items():
        path = results / f"{name}.json"
        if path.is_file():
            parts.append(make(json.loads(path.read_text(encoding="utf-8"))))
        else:
            parts.append(f"Not measured yet: `benchmarks/run.py --only {name}`.\n")
    return "\n".join(parts)


def page_with(text: str, results: pathlib.Path) -> str:
    return pages.with_part(text, BEGIN, END, f"\n{tables(results)}")


if __name__ == "__main__":
    pages.main(PAGE, page_with, tables)
