"""Cuts a list of costs into contiguous parts. Pure values."""

import bisect
import itertools
from collections.abc import Sequence

__all__ = ["balanced"]


def balanced(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Boundaries of len(speeds) parts, none of them empty, with the least largest time of a part, which is its costs
    over its speed; among those, with the least sum of squares of the times; then those that begin early. Exact, by
    dynamic programming. O(parts n log n + n^2) for n costs; 1 <= parts <= n."""
    parts, count = len(speeds), len(costs)
    sums = [0.0, *itertools.accumulate(costs)]

    def time(part: int, begin: int, end: int) -> float:
        return (sums[end] - sums[begin]) / speeds[part]

    # The least largest time of the first `part + 1` parts, which end at `end`.
    least = [time(0, 0, end) for end in range(count + 1)]
    for part in range(1, parts):
        found = [float("inf")] * (count + 1)
        for end in range(part + 1, count + 1):
            # What comes before grows with `begin`, and the time of this part falls.
            begins = range(part, end)
            crossing = bisect.bisect_left(
                begins,
                True,
                key=lambda begin: least[begin] >= time(part, begin, end),  # noqa: B023
            )
            near = [begins[at] for at in (crossing - 1, crossing) if 0 <= at < len(begins)]
            found[end] = min(max(least[begin], time(part, begin, end)) for begin in near)
        least = found
    limit = least[count]
    squares = [time(0, 0, end) ** 2 if end and time(0, 0, end) <= limit else float("inf") for end in range(count + 1)]
    chosen: list[list[int]] = []
    for part in range(1, parts):
        found, begun = [float("inf")] * (count + 1), [-1] * (count + 1)
        for end in range(part + 1, count + 1):
            for begin in range(end - 1, part - 1, -1):
                own = time(part, begin, end)
                if own > limit:
                    break
                if squares[begin] + own**2 <= found[end]:
                    found[end], begun[end] = squares[begin] + own**2, begin
        squares = found
        chosen.append(begun)
    boundaries = [count]
    for begun in reversed(chosen):
        boundaries.insert(0, begun[boundaries[0]])
    return [0, *boundaries]
