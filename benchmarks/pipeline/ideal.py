"""When a program of a pipeline ends if messages take no time: what a schedule allows. Plain Python 3.

`zeroth schedule` simulates one set of costs for all chunks; here each chunk has the times that were measured of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

COMPUTATIONS = ("F", "B", "I", "W")
Action = tuple[str, str, str]
"""kind, chunk, micro-batch"""


def parse(program: str) -> list[list[Action]]:
    """Of the text of a program: a list a rank."""
    ranks = []
    for line in program.strip().splitlines()[1:]:
        words = line.split(":", 1)[1].split()
        found = [re.fullmatch(r"(\d*)([A-Z_]+?)(\d*)", word) for word in words]
        ranks.append([(one[2], one[1], one[3]) for one in found if one is not None])
        if len(ranks[-1]) != len(words):
            raise ValueError(f"a line of a program cannot be read: {line}")
    return ranks


def ends(program: str, seconds: Mapping[str, float]) -> list[float]:
    """Of each rank: when its last computation ends. `seconds`: of each computation, "2F" is the forward of chunk 2; I
    and W are each half of B where they are missing."""
    ranks = parse(program)
    clocks = [0.0] * len(ranks)
    at = [0] * len(ranks)
    arrived: dict[Action, float] = {}
    while any(place < len(actions) for place, actions in zip(at, ranks, strict=True)):
        before = list(at)
        for rank, actions in enumerate(ranks):
            while at[rank] < len(actions):
                kind, chunk, micro_batch = actions[at[rank]]
                if kind.startswith("SEND"):
                    to = str(int(chunk) + (1 if kind == "SEND_F" else -1))
                    arrived["RECV" + kind[4:], to, micro_batch] = clocks[rank]
                elif kind.startswith("RECV"):
                    if (kind, chunk, micro_batch) not in arrived:
                        break
                    clocks[rank] = max(clocks[rank], arrived[kind, chunk, micro_batch])
                elif kind in COMPUTATIONS:
                    clocks[rank] += _of(seconds, chunk, kind)
                at[rank] += 1
        if at == before:
            raise ValueError("the ranks of a program wait for each other")
    return clocks


def _of(seconds: Mapping[str, float], chunk: str, kind: str) -> float:
    found = seconds.get(chunk + kind)
    return seconds[chunk + "B"] / 2 if found is None else found


def step_seconds(program: str, seconds: Mapping[str, float], updates: list[float]) -> float:
    """Of a whole step: ranks update when all of them have come to the end. `updates`: of each rank."""
    return max(ends(program, seconds)) + max(updates)


def held(program: str) -> list[int]:
    """Of each rank: most pairs of chunk and micro-batch between their forward and the end of their backward."""
    most = []
    for actions in parse(program):
        live = highest = 0
        for kind, _, _ in actions:
            live += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            highest = max(highest, live)
        most.append(highest)
    return most
