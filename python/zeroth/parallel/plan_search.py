"""The solver behind plan_batch(): places of sequences in aligned groups of ranks, so that the rank with the most has
little. A place is (size, first rank)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Place", "Problem", "greedy", "improve", "search", "settle"]

Place: TypeAlias = tuple[int, int]

MOST_STATES = 100_000
"""of a complete search; beyond them it gives what it has"""
_TARGETS = 24
"""times that the greedy search aims at, from the lower bound up"""
_MOVES = 200
"""of one improvement, at most"""


@dataclasses.dataclass(frozen=True)
class Problem:
    """`costs`: of each sequence, by the sizes of groups whose memory it fits in. `sizes`: rising."""

    ranks: int
    sizes: tuple[int, ...]
    costs: tuple[dict[int, float], ...]

    def loads(self, places: Sequence[Place]) -> list[float]:
        loads = [0.0] * self.ranks
        for costs, (size, begin) in zip(self.costs, places, strict=True):
            for rank in range(begin, begin + size):
                loads[rank] += costs[size]
        return loads

    @functools.cached_property
    def areas(self) -> list[float]:
        """Of each sequence, the least time of all ranks together."""
        return [min(size * one for size, one in costs.items()) for costs in self.costs]

    @functools.cached_property
    def bound(self) -> float:
        """No plan takes less: the least areas spread evenly, or the one sequence that takes longest at its best."""
        return max([sum(self.areas) / self.ranks, *(min(costs.values()) for costs in self.costs)], default=0.0)

    def canonical(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Equal for loads that differ only in the numbers of groups."""
        parts: list[tuple[float, ...]] = [(load,) for load in loads]
        width = 1
        for size in self.sizes[1:]:
            step = size // width
            parts = [
                tuple(load for part in sorted(parts[first : first + step]) for load in part)
                for first in range(0, len(parts), step)
            ]
            width = size
        return parts[0]


def greedy(problem: Problem) -> list[Place]:
    """For rising times: every sequence, the costliest first, over as few ranks as keep all of them below that time. The
    best of these, each improved."""
    best: list[Place] = []
    least = float("inf")
    for step in range(_TARGETS):
        places = improve(problem, _aim(problem, problem.bound * (1.0 + step * step / 300)))
        time = max(problem.loads(places), default=0.0)
        if time < least:
            best, least = places, time
        if least <= problem.bound * (1.0 + (step + 1) * (step + 1) / 300):
            break  # a later aim is higher than this
    return best


def _aim(problem: Problem, time: float) -> list[Place]:
    """Each sequence over the fewest ranks of whom some group ends before `time` with it: the one with the least to do.
    Where there is none, wherever it ends first."""
    places: list[Place] = [(1, 0)] * len(problem.costs)
    tops = {size: [0.0] * (problem.ranks // size) for size in problem.sizes}  # of each group, its rank with the most
    loads = tops[problem.sizes[0]]
    for number in sorted(range(len(problem.costs)), key=lambda one: (-problem.areas[one], one)):
        chosen = (float("inf"), 1, 0)
        for size, cost in problem.costs[number].items():
            group_tops = tops[size]
            top = min(group_tops)
            if top + cost < chosen[0]:
                chosen = (top + cost, size, group_tops.index(top) * size)
            if top + cost <= time:
                break
        _, size, begin = chosen
        places[number] = (size, begin)
        for rank in range(begin, begin + size):
            loads[rank] += problem.costs[number][size]
        for width in problem.sizes[1:]:
            for group in range(begin // width, (begin + size - 1) // width + 1):
                tops[width][group] = max(loads[group * width : (group + 1) * width])
    return places


def improve(problem: Problem, places: Sequence[Place]) -> list[Place]:
    """Moves single sequences away from the rank with the most, each to where the most is least, as long as that
    helps."""
    best = list(places)
    loads = problem.loads(best)
    for _ in range(_MOVES):
        most = max(loads, default=0.0)
        if most <= problem.bound:
            break
        worst = loads.index(most)
        move = None
        for number, (size, begin) in enumerate(best):
            if not begin <= worst < begin + size:
                continue
            without = list(loads)
            for rank in range(begin, begin + size):
                without[rank] -= problem.costs[number][size]
            rest = max(without)
            if rest >= most:
                continue
            for other, cost in problem.costs[number].items():
                tops = [max(without[first : first + other]) for first in range(0, problem.ranks, other)]
                top = min(tops)
                key = (max(rest, top + cost), number, other, tops.index(top) * other)
                if key[0] < most * (1 - 1e-12) and (move is None or key < move):
                    move = key
        if move is None:
            break
        best[move[1]] = (move[2], move[3])
        loads = problem.loads(best)
    return best


def settle(problem: Problem, places: Sequence[Place]) -> list[Place]:
    """Moves each sequence, the cheapest first, to as few ranks as it needs for a plan that takes no longer: a tie goes
    to fewer ranks. Moves make room for others, so they go on until there is none."""
    best = list(places)
    loads = problem.loads(best)
    most = max(loads, default=0.0)
    order = sorted(range(len(best)), key=lambda one: (problem.areas[one], one))
    moved = True
    while moved:
        moved = False
        for number in order:
            size, begin = best[number]
            if size == min(problem.costs[number]):
                continue
            without = list(loads)
            for rank in range(begin, begin + size):
                without[rank] -= problem.costs[number][size]
            for fewer, cost in problem.costs[number].items():
                if fewer >= size:
                    break
                tops = [max(without[first : first + fewer]) for first in range(0, problem.ranks, fewer)]
                if min(tops) + cost > most:
                    continue
                best[number] = fewer, tops.index(min(tops)) * fewer
                after = problem.loads(best)
                if max(after) <= most:  # and not by rounding only
                    loads, moved = after, True
                    break
                best[number] = size, begin
    return best


def search(problem: Problem, places: Sequence[Place]) -> tuple[list[Place], bool]:
    """Depth first through all places, the costliest sequence first, without what cannot be better than the best so far
    and without states that were seen with other numbers of groups. Returns the best, and whether the search was
    complete."""
    order = sorted(range(len(problem.costs)), key=lambda one: (-problem.areas[one], one))
    rest = [0.0]
    for number in reversed(order):
        rest.insert(0, rest[0] + problem.areas[number])
    best = list(places)
    least = max(problem.loads(best), default=0.0)
    seen: set[tuple[int, tuple[float, ...]]] = set()
    chosen = list(places)

    def descend(depth: int, loads: list[float]) -> None:
        nonlocal best, least
        if len(seen) > MOST_STATES:
            return
        if depth == len(order):
            if max(loads) < least:
                best, least = list(chosen), max(loads)
            return
        number = order[depth]
        moves = []
        for size, cost in problem.costs[number].items():
            for begin in range(0, problem.ranks, size):
                moves.append((max(loads[begin : begin + size]) + cost, size, begin))
        for top, size, begin in sorted(moves):
            if top >= least:
                break
            after = list(loads)
            for rank in range(begin, begin + size):
                after[rank] += problem.costs[number][size]
            if max(max(after), (sum(after) + rest[depth + 1]) / problem.ranks) >= least:
                continue
            key = (depth, problem.canonical(after))
            if key in seen:
                continue
            seen.add(key)
            chosen[number] = (size, begin)
            descend(depth + 1, after)
            if least <= problem.bound:
                return

    if least > problem.bound:
        descend(0, [0.0] * problem.ranks)
    return best, len(seen) <= MOST_STATES
