#!/usr/bin/env python3
"""Checks result files against schema.json, prints them, compares two.

  compare.py FILE...               check and print each
  compare.py --check FILE...       check only; exit code 1 if one does not fit
  compare.py --diff OLD NEW        rows of both, matched by name, and whether their intervals part

Plain Python 3, no packages.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from typing import Any

SCHEMA = pathlib.Path(__file__).resolve().parent / "schema.json"
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What of `value` does not fit; knows the keywords that schema.json uses."""
    place = where or "/"
    if "const" in schema and value != schema["const"]:
        return [f"{place}: expected {schema['const']!r}, got {value!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: expected one of {schema['enum']}, got {value!r}"]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{place}: expected {kind}, got {type(value).__name__}"]
    found: list[str] = []
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{place}: {value!r} does not match {schema['pattern']}")
    if "minLength" in schema and len(value) < schema["minLength"]:
        found.append(f"{place}: is empty")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place}: {value} is below {schema['minimum']}")
    if kind == "array" and "items" in schema:
        for index, item in enumerate(value):
            found += problems(item, schema["items"], f"{where}/{index}")
    if kind == "object":
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        found += [f"{place}: {name!r} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name in known:
                found += problems(item, known[name], f"{where}/{name}")
            elif other is False:
                found.append(f"{place}: {name!r} is unknown")
            elif isinstance(other, dict):
                found += problems(item, other, f"{where}/{name}")
    return found


def load(path: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The result, or what is wrong with it."""
    try:
        result = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [str(error)]
    found = problems(result, json.loads(SCHEMA.read_text(encoding="utf-8")))
    if not found:
        names = [row["name"] for row in result["rows"]]
        found = [f"/rows: {name!r} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    return (None, found) if found else (result, [])


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f}" if abs(value) < 1e5 else f"{value:,.0f}"


def interval(row: dict[str, Any]) -> str:
    return f"[{number(row['low'])}, {number(row['high'])}]" if "low" in row and "high" in row else ""


def verdict(row: dict[str, Any]) -> str:
    """How the median stands to the bar."""
    if "bar" not in row:
        return ""
    met = row["median"] <= row["bar"] if row["better"] == "lower" else row["median"] >= row["bar"]
    return "met" if met else "MISSED"


def print_table(header: list[str], lines: list[list[str]]) -> None:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    for line in [header, ["-" * width for width in widths], *lines]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ]
        print("  ".join(cells).rstrip())


def show(path: str, result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(f"{result['benchmark']}  {result['date']}  ({path})")
    print(f"  {result['command']}")
    foreign = machine.get("foreign_cpu_seconds")
    print(
        f"  {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB, Linux {machine['kernel']}, "
        f"load {machine['load_before']:.1f} -> {machine['load_after']:.1f}"
        + ("" if foreign is None else f", {foreign:.0f} s of CPU used by others")
    )
    print("  " + ", ".join(f"{name} {value}" for name, value in result["versions"].items()))
    print("  " + ", ".join(f"{name} {value}" for name, value in result["settings"].items()))
    lines = [
        [
            row["name"],
            number(row["median"]),
            row["unit"],
            interval(row),
            str(row.get("samples", "")),
            number(row.get("bar")),
            verdict(row),
        ]
        for row in result["rows"]
    ]
    print_table(["", "median", "unit", "95 %", "n", "bar", ""], lines)
    for name, reason in result.get("failures", {}).items():
        print(f"  FAILED: {name}: {reason}")
    for note in result["notes"]:
        print(f"  note: {note}")
    print()


def change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Only intervals that do not touch count as a difference."""
    if old["better"] == "none" or not all("low" in row and "high" in row for row in (old, new)):
        return ""
    if new["low"] > old["high"]:
        return "worse" if old["better"] == "lower" else "better"
    if new["high"] < old["low"]:
        return "better" if old["better"] == "lower" else "worse"
    return "same"


def diff(old: dict[str, Any], new: dict[str, Any]) -> None:
    if old["benchmark"] != new["benchmark"]:
        print(f"note: {old['benchmark']} is compared with {new['benchmark']}")
    for key in ("cpu", "cores", "kernel"):
        if old["machine"][key] != new["machine"][key]:
            print(f"note: machines differ in {key}: {old['machine'][key]} and {new['machine'][key]}")
    for key in sorted(old["settings"].keys() | new["settings"].keys()):
        if old["settings"].get(key) != new["settings"].get(key):
            print(f"note: {key}: {old['settings'].get(key)} and {new['settings'].get(key)}")
    before = {row["name"]: row for row in old["rows"]}
    after = {row["name"]: row for row in new["rows"]}
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(name), after.get(name)
        lines.append(
            [
                name,
                number(a["median"]) if a else "-",
                interval(a) if a else "",
                number(b["median"]) if b else "-",
                interval(b) if b else "",
                (a or b or {}).get("unit", ""),
                change(a, b) if a and b else "",
            ]
        )
    print_table(["", "old", "95 %", "new", "95 %", "unit", ""], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--diff", action="store_true", help="compare two files")
    arguments = parser.parse_args()
    if arguments.diff and len(arguments.files) != 2:
        parser.error("--diff takes two files")
    results = []
    failed = False
    for path in arguments.files:
        result, found = load(path)
        if result is None:
            failed = True
            print(f"{path}: does not fit {SCHEMA.name}", *found, sep="\n  ", file=sys.stderr)
        else:
            results.append((path, result))
    if failed:
        return 1
    if arguments.diff:
        diff(results[0][1], results[1][1])
    elif not arguments.check:
        for path, result in results:
            show(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
