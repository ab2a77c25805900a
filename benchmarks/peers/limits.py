"""What a step cannot do without: bytes on the wire, bytes held, and the time that the copies take at memory speed.
Plain Python 3.

A parameter and a gradient have 4 bytes (fp32) or 2 (bf16), the optimizer's state 8, or 10 with
what bf16 parameters lack of their fp32 masters.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from cells import Entry

COLLECTIVE_MIB = 64


def element_bytes(dtype: str) -> int:
    return 2 if dtype == "bf16" else 4


def wire_bytes(entry: Entry, parameters: int, dtype: str, ranks: int) -> int:
    """Of all ranks in a step: S (N-1) for each pass."""
    return entry.passes * parameters * element_bytes(dtype) * (ranks - 1)


def held_bytes(entry: Entry, dtype: str, ranks: int, *, gradients: bool) -> float:
    """Of a parameter on one rank, after backward (with gradients) or after the step."""
    element = element_bytes(dtype)
    state = 10 if dtype == "bf16" else 8
    shards = {"nothing": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[entry.group]
    held = state / ranks if shards >= 1 else float(state)
    held += element / ranks if shards >= 3 else element
    if gradients:
        held += element / ranks if shards >= 2 else element
    return held


def roof_ms(entry: Entry, parameters: int, dtype: str, ranks: int, results: pathlib.Path) -> float | None:
    """What the copies of the passes take if every byte moves at the speed of memory: from the roofs beside which
    collectives_bench measured ours. None where it was not run on so many ranks."""
    path = results / f"collectives-{ranks}-ranks.json"
    if not path.is_file():
        return None
    rows = {row["name"]: row["median"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}

    def roof_us(collective: str) -> float:
        name = f"n={ranks} {COLLECTIVE_MIB}.0 MiB {collective}"
        return float(rows[name] / rows[f"{name} / roof"])

    mebibytes = parameters * element_bytes(dtype) / 2**20
    us = roof_us("reduce_scatter attached") + (entry.passes - 1) * roof_us("gather pulled")
    return us * mebibytes / COLLECTIVE_MIB / 1e3


def cells_of(entry: Entry, record: dict[str, Any], results: pathlib.Path) -> list[str]:
    """Beyond the floor in all and by phase, roof; wire, paper; held after backward and least, after the step and
    least."""
    settings = record["settings"]
    parameters, dtype, ranks = settings["parameters"], settings["dtype"], settings["ranks"]
    medians = {row["name"]: row["median"] for row in record["rows"]}

    def beyond(phase: str) -> str:
        value = medians.get(f"{entry.name}: {phase} beyond floor")
        return "" if value is None else f"{value:,.1f}"

    def held(when: str, *, gradients: bool) -> list[str]:
        megabytes = medians.get(f"{entry.name}: tracked after {when}, largest rank")
        measured = "" if megabytes is None else f"{megabytes * 1e6 / parameters:.2f}"
        return [measured, f"{held_bytes(entry, dtype, ranks, gradients=gradients):.2f}"]

    roof = roof_ms(entry, parameters, dtype, ranks, results)
    wire = medians.get(f"{entry.name}: wire a step, all ranks")
    return [
        beyond("step"),
        " / ".join(map(beyond, ("forward", "backward", "update"))).strip(" /"),
        "" if roof is None else f"{roof:.1f}",
        "" if wire is None else f"{wire:,.1f}",
        f"{wire_bytes(entry, parameters, dtype, ranks) / 1e6:,.1f}",
        *held("backward", gradients=True),
        *held("step", gradients=False),
    ]


HEADER = [
    "ms beyond floor",
    "forward / backward / update",
    "roof, ms",
    "wire MB",
    "paper, MB",
    "B a parameter after backward",
    "least",
    "after step",
    "least",
]
