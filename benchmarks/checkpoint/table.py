#!/usr/bin/env python3
"""Writes the table of docs/checkpoints.md from the committed results.

table.py            prints it
table.py --page     writes it into the page
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import pages  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/checkpoints.md"
BEGIN, END = "<!-- saves -->", "<!-- end of saves -->"
NAMES = [f"checkpoint-{size}-{ranks}" for size in (382, 2016) for ranks in ("1-rank", "2-ranks")]


def median(result: dict[str, Any], name: str) -> str:
    for row in result["rows"]:
        if row["name"] == name:
            return f"{row['median']:.2f}"
    return ""


def line(result: dict[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    pairs = [
        ("zeroth: save", "limit: write"),
        ("zeroth: save behind, stall", "limit: memory copy"),
        ("zeroth: load, disk", "limit: read, disk"),
        ("zeroth: load, cache", "limit: read, cache"),
    ]
    cells = [f"{settings['state_MB']:,.0f} MB, {settings['ranks']} rank{'s' if settings['ranks'] > 1 else ''}"]
    cells += [f"{median(result, ours)} / {median(result, limit)}" for ours, limit in pairs]
    cells += [median(result, name) for name in ("torch.save and fsync, rank 0", "DCP: save", "DCP async: stall")]
    cells.append(median(result, "steps with a save behind each over steps") or "-")
    cells.append(f"{machine['load_before']:.1f} to {machine['load_after']:.1f}")
    return "| " + " | ".join(cells) + " |"


def table(results: pathlib.Path) -> str:
    head = [
        "states",
        "save / limit",
        "stall behind / memory copy",
        "load, disk / limit",
        "load, cache / limit",
        "`torch.save`, fsync",
        "DCP",
        "DCP async, stall",
        "steps with a save behind each, ratio",
        "load of the machine",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in NAMES:
        path = results / f"{name}.json"
        if path.exists():
            lines.append(line(json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(lines)


def page_with(text: str, results: pathlib.Path) -> str:
    return pages.with_part(text, BEGIN, END, table(results))


if __name__ == "__main__":
    pages.main(PAGE, page_with, table)
