"""Which ranks compute which sequences of a batch: long ones over many ranks, short ones on one. Pure functions.

Ranks are numbered so that groups are aligned: ranks 0 to 3, 4 to 7, ... share a group of four. Each rank computes its
groups from the largest to the smallest. Groups are nested, so all ranks of a group come to it at the same time, and a
rank's time is the sum of what its groups cost: nobody waits inside of a plan, and the step takes as long as the rank
with the most.

Sources: ByteScale, Ge et al., 2025, arXiv 2502.21231; FlexSP, Wang et al., Data-Centric and Heterogeneity-Adaptive
Sequence Parallelism, 2024, arXiv 2412.01523. Theirs solve an integer program; here there is a search that is complete
for few sequences and a greedy one for many."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from zeroth import _C
from zeroth.parallel.plan_search import Problem, greedy, search, settle

__all__ = ["BatchPlan", "CostFunction", "Work", "group_sizes", "plan_batch"]

CostFunction: TypeAlias = Callable[[int, int], float]
"""time on each rank of a sequence of so many tokens over so many ranks"""

EXACT_UP_TO = 8
"""sequences of a batch for which the search is complete"""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Sequences that a group computes together: one row, documents one after another. A frozen value."""

    begin: int
    """first rank"""
    size: int
    """number of ranks"""
    sequences: tuple[int, ...]
    """numbers in the batch"""
    tokens: int
    """of all of them"""

    @property
    def ranks(self) -> range:
        return range(self.begin, self.begin + self.size)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchPlan:
    """What plan_batch() found. A frozen value; equal on all ranks that gave it the same."""

    ranks: int
    works: tuple[Work, ...]
    """larger groups first: the order in which every rank computes its own"""
    loads: tuple[float, ...]
    """time of each rank"""
    bound: float
    """no plan takes less than this"""
    is_optimal: bool
    """the search was complete: no plan takes less than this one"""

    @property
    def makespan(self) -> float:
        """Time of the step."""
        return max(self.loads)

    @property
    def imbalance(self) -> float:
        """Time of the step by the mean of the ranks; 1.0 is even."""
        mean = sum(self.loads) / self.ranks
        return self.makespan / mean if mean > 0 else 1.0

    @property
    def rounds(self) -> int:
        """Rows that the busiest rank computes."""
        return max(len(self.of_rank(rank)) for rank in range(self.ranks))

    def of_rank(self, rank: int) -> list[Work]:
        """The rank's rows, in order. Ranks that share a row have it at the same place."""
        return [work for work in self.works if rank in work.ranks]

    def __str__(self) -> str:
        lines = [f"{len(self.works)} rows on {self.ranks} ranks, imbalance {self.imbalance:.3f}"]
        for work in self.works:
            who = f"rank {work.begin}" if work.size == 1 else f"ranks {work.begin}-{work.begin + work.size - 1}"
            lines.append(f"{who}: {work.tokens} tokens of {len(work.sequences)} sequences {list(work.sequences)}")
        return "\n".join(lines)


def group_sizes(ranks: int) -> list[int]:
    """Sizes of groups over so many ranks: every power of two that divides their number, and all of them."""
    sizes = [1]
    while ranks % (2 * sizes[-1]) == 0:
        sizes.append(2 * sizes[-1])
    return sizes if sizes[-1] == ranks else [*sizes, ranks]


def plan_batch(
    lengths: Sequence[int],
    ranks: int,
    cost: CostFunction,
    *,
    memory_tokens: int | None = None,
    pack: bool = True,
    exact_up_to: int = EXACT_UP_TO,
) -> BatchPlan:
    """A plan of a batch whose sequences have these lengths, that takes little time.

    `cost`: a pure function, for instance a SequenceCost. `memory_tokens`: what a rank can have of one row; None: any
    length. `pack`: sequences of the same group are one row as far as memory goes; False: each is a row.
    For up to `exact_up_to` sequences the plan is one of those that take least, unless the search would take too long
    (`is_optimal` says it); for more, the best of several greedy ones, improved by moves. No sequence is shared by more
    ranks than the plan's time needs. Deterministic: the same on every rank and machine with IEEE arithmetic. No
    sequences give an empty plan.
    Raises Error USAGE for a length below 1, for ranks below 1, for a cost that is no finite number from 0, and for a
    sequence that is longer than all memory, with its number."""
    sizes = _checked_sizes(lengths, ranks)
    limit = max(lengths, default=1) if memory_tokens is None else memory_tokens
    costs: list[dict[int, float]] = []
    seen: dict[int, dict[int, float]] = {}
    for number, length in enumerate(lengths):
        if length not in seen:
            fits = [size for size in sizes if -(-length // size) <= limit]
            if not fits:
                raise _refusal(
                    "a sequence is longer than the memory of all ranks",
                    f"sequence {number}",
                    f"{limit * sizes[-1]} tokens: {ranks} ranks with {limit} each",
                    f"{length}",
                )
            seen[length] = {size: _checked(cost(length, size), length, size) for size in fits}
        costs.append(seen[length])
    problem = Problem(ranks=ranks, sizes=tuple(sizes), costs=tuple(costs))
    places, is_optimal = greedy(problem), False
    if len(lengths) <= exact_up_to:
        places, is_optimal = search(problem, places)
    places = settle(problem, places)
    loads = problem.loads(places)
    works = _rows(lengths, places, limit, pack)
    return BatchPlan(ranks, works, tuple(loads), problem.bound, is_optimal or max(loads) <= problem.bound)


def _rows(lengths: Sequence[int], places: Sequence[tuple[int, int]], limit: int, pack: bool) -> tuple[Work, ...]:
    """Sequences of the same group in as few rows as first-fit finds, longest first."""
    of_group: dict[tuple[int, int], list[list[int]]] = {}
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        size = places[number][0]
        rows = of_group.setdefault(places[number], [])
        own = -(-lengths[number] // size)
        for row in rows if pack else []:
            if sum(-(-lengths[other] // size) for other in row) + own <= limit:
                row.append(number)
                break
        else:
            rows.append([number])
    return tuple(
        Work(begin, size, tuple(row), sum(lengths[number] for number in row))
        for (size, begin), rows in sorted(of_group.items(), key=lambda item: (-item[0][0], item[0][1]))
        for row in rows
    )


def _checked_sizes(lengths: Sequence[int], ranks: int) -> list[int]:
    if ranks < 1:
        raise _refusal("there are no ranks to plan for", "ranks", "1 or more", str(ranks))
    for number, length in enumerate(lengths):
        if length < 1:
            raise _refusal("a sequence has no tokens", f"sequence {number}", "1 or more", str(length))
    return group_sizes(ranks)


def _checked(value: float, length: int, size: int) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise _refusal("a cost is no time", f"cost({length}, {size})", "a finite number from 0", repr(value))
    return value


def _refusal(message: str, which: str, expected: str, got: str) -> _C.Error:
    return _C.make_error("USAGE", message, where="parallel.plan_batch", which=which, expected=expected, got=got)
