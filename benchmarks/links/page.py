#!/usr/bin/env python3
"""Writes the tables and the picture of docs/slow-links.md from the committed result of to_loss.py.

page.py            prints the tables
page.py --page     writes them into the page, and docs/slow-links.svg; the picture needs matplotlib
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import pages  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/slow-links.md"
PICTURE = ROOT / "docs/slow-links.svg"
BEGIN, END = "<!-- seconds to a loss -->", "<!-- end of seconds to a loss -->"
NAME = "links-to-loss.json"
PERCENT = (2, 5)
DRAWN = {
    "AdamW": "-",
    "OneBitAdam": "-",
    "ZeroOneAdam": "-",
    "ZeRO++ gradients": "-",
    "Streaming DiLoCo": "-",
    "DDP, PowerSGD": "--",
    "DeepSpeed OneBitAdam": "--",
}
"""peers are dashed"""


def medians(result: dict[str, Any]) -> dict[str, float]:
    return {row["name"]: row["median"] for row in result["rows"]}


def cell(found: dict[str, float], name: str, form: str) -> str:
    return format(found[name], form) if name in found else ""


def methods(result: dict[str, Any]) -> list[str]:
    """In the order of the rows; those of other stages have times only."""
    names = []
    for row in result["rows"]:
        name, _, what = row["name"].partition(" Gbit/s, ")[2].rpartition(": ")
        if what == "step" and name not in names and name != "DeepSpeed, sums":
            names.append(name)
    return names


def losses(result: dict[str, Any]) -> list[str]:
    found = medians(result)
    head = [
        "method",
        "learning rate",
        "loss at the end",
        "MB a late step, at the cable",
        "by the formula",
        "MB of the run",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in methods(result):
        if f"{name}: loss at the end" not in found:
            continue
        cells = [name, cell(found, f"{name}: learning rate", "g"), cell(found, f"{name}: loss at the end", ".3f")]
        cells.append(cell(found, f"{name}: MB a late step, at the cable", ".2f"))
        cells.append(cell(found, f"{name}: MB a late step, by the formula", ".2f"))
        cells.append(cell(found, f"{name}: MB of the run, at the cable", ",.0f"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def by_speed(result: dict[str, Any], title: str, last: str, cells_of: Callable[[str, str], str]) -> list[str]:
    """A row a method, a column a speed; `cells_of` a method and a speed. `last`: CPU at the greatest speed; or none."""
    speeds = [f"{gbit:g}" for gbit in result["settings"]["gbit"]]
    head = [title, *(f"{gbit} Gbit/s" for gbit in speeds), *([last] if last else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in methods(result):
        cells = [name, *(cells_of(name, gbit) for gbit in speeds)]
        if last:
            cells.append(cell(medians(result), f"{speeds[-1]} Gbit/s, {name}: CPU of a step", ".0f"))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def seconds(result: dict[str, Any]) -> list[str]:
    found = medians(result)

    def of_loss(name: str, gbit: str) -> str:
        rows = (f"{gbit} Gbit/s, {name}: seconds to {percent} % above AdamW's last loss" for percent in PERCENT)
        return " / ".join(cell(found, row, ".0f") or "-" for row in rows)

    targets = " / ".join(f"{percent} %" for percent in PERCENT)
    lines = by_speed(result, f"seconds to {targets}", "", of_loss)
    lines += [
        "",
        *by_speed(
            result, "ms a late step", "CPU ms", lambda name, gbit: cell(found, f"{gbit} Gbit/s, {name}: step", ".0f")
        ),
    ]
    speeds = [f"{gbit:g}" for gbit in result["settings"]["gbit"]]
    moved = [cell(found, f"{gbit} Gbit/s: what gloo moves in an all-reduce of 8 MiB", ".2g") for gbit in speeds]
    lines.append("| Gbit/s that gloo moves | " + " | ".join(moved) + " |  |")
    return lines


def table(results: pathlib.Path) -> str:
    result = json.loads((results / NAME).read_text(encoding="utf-8"))
    return "\n".join([*losses(result), "", *seconds(result)])


def page_with(text: str, results: pathlib.Path) -> str:
    return pages.with_part(text, BEGIN, END, table(results))


def draw(results: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "zeroth", "font.size": 8}
    from matplotlib import pyplot

    settings = json.loads((results / NAME).read_text(encoding="utf-8"))["settings"]
    figure, axes = pyplot.subplots(1, len(settings["gbit"]), figsize=(12, 3.4), sharey=True)
    for plot, (gbit, of_speed) in zip(axes, settings["seconds"].items(), strict=True):
        for name, style in DRAWN.items():
            if name in of_speed:
                plot.plot(of_speed[name], settings["losses"][name], style, label=name, linewidth=1)
        plot.set(xscale="log", xlabel=f"seconds, over {gbit} Gbit/s")
        plot.axhline((1 + PERCENT[0] / 100) * settings["losses"]["AdamW"][-1], linestyle=":", color="grey", linewidth=1)
    axes[0].set(ylabel="loss")
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    pages.main(PAGE, page_with, table)
    if "--page" in sys.argv[1:]:
        draw(ROOT / "benchmarks/results")
