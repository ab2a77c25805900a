"""Short lists in place of whole grids: every two values of two factors meet in a row. What a row does not show is a
fault that needs three values at once; the long tier has the grids."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """The same rows each time. As many as the two largest factors multiplied, or a few more."""
    names = list(factors)
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(range(len(names)), 2)
        for first in range(len(factors[names[one]]))
        for second in range(len(factors[names[other]]))
    }

    def gain(chosen: dict[int, int], factor: int, value: int) -> int:
        return sum(tuple(sorted([(factor, value), pair])) in missing for pair in chosen.items())

    rows = []
    while missing:
        chosen = dict(min(missing))
        for factor in range(len(names)):
            if factor not in chosen:
                # Of values that are as good, another one in each row.
                turn = len(rows)
                count = len(factors[names[factor]])
                values = [(turn + step) % count for step in range(count)]
                chosen[factor] = max(values, key=lambda value: gain(chosen, factor, value))  # noqa: B023
        missing -= set(itertools.combinations(sorted(chosen.items()), 2))
        rows.append({name: factors[name][chosen[index]] for index, name in enumerate(names)})
    return rows


def beside(rows: list[dict[str, Any]], name: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """One more factor, whose values come in turn, each at least once."""
    count = max(len(rows), len(values))
    return [rows[index % len(rows)] | {name: values[index % len(values)]} for index in range(count)]
