#!/usr/bin/env python3
"""Markdown tables of the peers' results.

  table.py FILE...             prints the table of each result
  table.py --page PAGE         writes the tables of benchmarks/results into the page, between its markers
  table.py --page PAGE --check changes nothing; exit code 1 if the page is not what it would write

A table stands between "<!-- KIND NAME -->" and "<!-- end -->". KIND is contestants or behind (NAME is all), or steps,
limits or states of the result NAME.json. Plain Python 3.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import textwrap
from typing import Any

import limits
from cells import BARE, CELLS, ENTRIES, Entry

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
MARKERS = re.compile(r"(<!-- (contestants|behind|steps|limits|states) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

# Of the table of steps: title, rows ("a|b" are two figures in one cell), digits. A column without any row is left out.
COLUMNS = [
    ("step, ms", "step", 1),
    ("over floor", "step over floor", 3),
    ("us a module", "a module beyond floor", 1),
    ("tokens/s", "tokens", 0),
    ("CPU s a step", "CPU of a step, all ranks", 2),
    ("tracked MB after backward / step", "tracked after backward, largest rank|tracked after step, largest rank", 1),
    ("highest", "tracked highest, largest rank", 1),
    ("peak PSS, MiB", "peak PSS, all ranks", 0),
    ("wire MB a step", "wire a step, all ranks", 1),
    ("start-up, s", "start-up", 2),
    ("over bare, s", "start-up over bare", 2),
]

# Columns in which a stage is compared with peers of its own, where less is better: field and digits. Tokens/s follow
# from the step.
COMPARED = [
    ("step over floor", 3),
    ("CPU of a step, all ranks", 2),
    ("tracked after backward, largest rank", 1),
    ("tracked after step, largest rank", 1),
    ("tracked highest, largest rank", 1),
    ("peak PSS, all ranks", 0),
    ("wire a step, all ranks", 1),
    ("start-up", 2),
]

Result = dict[str, Any]


def markdown(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def present(result: Result) -> list[Entry]:
    """The contestants of a result, also those that failed."""
    return [entry for entry in ENTRIES if entry.name in result["settings"]["contestants"]]


def contestants() -> str:
    return markdown(
        ["name", "what", "configured"], [[f"`{entry.name}`", entry.title, entry.how] for entry in [*ENTRIES, BARE]]
    )


def steps(result: Result) -> str:
    """What was measured, facts above it, losses and failures below it."""
    rows = {row["name"]: row for row in result["rows"]}
    failures: dict[str, str] = result.get("failures", {})
    measured = {name.split(": ", 1)[1] for name in rows}
    columns = [column for column in COLUMNS if measured & set(column[1].split("|"))]

    def figure(row: dict[str, Any], digits: int) -> str:
        text = f"{row['median']:,.{digits}f}"
        many = row.get("samples", 1) > 1 and "low" in row
        return f"{text} [{row['low']:,.{digits}f}, {row['high']:,.{digits}f}]" if many else text

    def line(entry: Entry) -> list[str]:
        cells = []
        for _, fields, digits in columns:
            found = [rows.get(f"{entry.name}: {field}") for field in fields.split("|")]
            cells.append(" / ".join(figure(row, digits) for row in found if row))
        failed = any(who.startswith(f"{entry.name}, ") for who in failures)
        return [entry.title, *(cell or ("failed" if failed else "") for cell in cells)]

    bare = [BARE] if f"{BARE.name}: start-up" in rows else []
    table = markdown(["", *(title for title, _, _ in columns)], [line(entry) for entry in [*present(result), *bare]])
    reasons = "".join(f"- {who}: failed: {why}\n" for who, why in failures.items())
    return f"{paragraph(facts(result))}\n\n{table}\n{paragraph(losses(result))}\n" + (f"\n{reasons}" if reasons else "")


def facts(result: Result) -> str:
    settings, machine = result["settings"], result["machine"]
    foreign = machine.get("foreign_cpu_seconds")
    return (
        f"{settings['parameters']:,} parameters, {settings['dtype']}, {settings['ranks']} ranks, "
        f"{settings['cycles']} cycles; "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, {result['date'][:10]}"
        + ("." if foreign is None else f"; others used {foreign:.0f} s of CPU.")
    )


def losses(result: Result) -> str:
    """Whether all trained the same thing."""
    medians = {row["name"]: row["median"] for row in result["rows"]}
    who: dict[str, list[str]] = {}
    for entry in present(result):
        loss = medians.get(f"{entry.name}: last loss alone, rank 0")
        if loss is not None:
            who.setdefault(f"{loss:.6f}", []).append(entry.name)
    told = "; ".join(f"{loss} ({', '.join(names)})" for loss, names in who.items())
    text = f"Loss of rank 0 in step {result['settings']['solo_steps']}: {told}."
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def limits_of(result: Result, results: pathlib.Path) -> str:
    """What was measured beside what cannot be avoided."""
    entries = [entry for entry in present(result) if entry.name != "floor"]
    return markdown(
        ["", *limits.HEADER], [[entry.title, *limits.cells_of(entry, result, results)] for entry in entries]
    )


def states(result: Result) -> str:
    """Bytes a parameter by state, of rank 0."""
    parameters = result["settings"]["parameters"]
    told: dict[str, dict[str, int]] = result["settings"]["bytes_by_state"]
    names = sorted({state for held in told.values() for state in held})
    lines = [
        [entry.title, *(f"{told[entry.name].get(state, 0) / parameters:.3f}" for state in names)]
        for entry in present(result)
        if told.get(entry.name)
    ]
    return markdown(["", *names], lines)


def behind(results: pathlib.Path) -> str:
    """Where a stage has more than a peer that shares out the same state, and whether the intervals of both meet."""
    lines = []
    for cell in CELLS:
        path = results / f"{cell.name}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["name"]: row for row in result["rows"]}
        entries = present(result)
        for own in (entry for entry in entries if entry.name.startswith("zeroth-")):
            peers = [entry for entry in entries if entry.group == own.group and entry is not own]
            for field, digits in COMPARED:
                mine = rows.get(f"{own.name}: {field}")
                if mine is None:
                    continue
                theirs = [(rows[f"{peer.name}: {field}"], peer) for peer in peers if f"{peer.name}: {field}" in rows]
                less = sorted(
                    ((row, peer) for row, peer in theirs if row["median"] < mine["median"]),
                    key=lambda one: one[0]["median"],
                )
                if not less:
                    continue
                most = less[-1][0]["median"]
                shown = next(d for d in (digits, 3, 6, 9) if f"{most:.{d}f}" != f"{mine['median']:.{d}f}" or d == 9)
                told = ", ".join(f"{peer.title} {row['median']:,.{shown}f}" for row, peer in less)
                meets = any(row.get("high", row["median"]) >= mine.get("low", mine["median"]) for row, _ in less)
                lines.append(
                    [
                        cell.name,
                        own.title,
                        f"{field}, {mine['unit']}",
                        f"{mine['median']:,.{shown}f}",
                        told,
                        "yes" if meets else "",
                    ]
                )
    return markdown(["cell", "stage", "column", "Zeroth", "less", "intervals meet"], lines)


def of_marker(kind: str, name: str, results: pathlib.Path) -> str:
    if kind == "contestants":
        return contestants()
    if kind == "behind":
        return behind(results)
    path = results / f"{name}.json"
    if not path.is_file():
        return f"Not measured yet: `benchmarks/run.py --only {name}`.\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    if kind == "limits":
        return limits_of(result, results)
    return steps(result) if kind == "steps" else states(result)


def of_page(text: str, results: pathlib.Path) -> str:
    """The page with all its tables as the results have them."""
    return MARKERS.sub(lambda match: f"{match[1]}{of_marker(match[2], match[3], results)}{match[5]}", text)


def write_page(page: pathlib.Path, results: pathlib.Path) -> None:
    page.write_text(of_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for path in arguments.files:
        print(steps(json.loads(path.read_text(encoding="utf-8"))))
    if arguments.page is None:
        return 0
    if not arguments.check:
        write_page(arguments.page, arguments.results)
        return 0
    text = arguments.page.read_text(encoding="utf-8")
    if of_page(text, arguments.results) == text:
        return 0
    print(
        f"{arguments.page}: its tables are not those of {arguments.results}; --page without --check writes them",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
