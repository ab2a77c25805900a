"""Rows of a tensor that other ranks have: what a convolution needs of its neighbours when an image is split along its
height. Source: Gholami et al., Integrated Model, Batch and Domain Parallelism in Training Neural Networks, 2018, arXiv
1712.04432 (domain parallelism)."""

import itertools
from collections.abc import Sequence

import torch

from zeroth import _C

__all__ = ["fetch_rows", "halo_exchange", "heights_of", "received_rows"]

Rows = tuple[int, int]
"""first row, and the one behind the last"""


def heights_of(x: torch.Tensor, dim: int, group: _C.Communicator) -> list[int]:
    """Rows that each rank has. Collective: 8 bytes a rank."""
    if group.size == 1:
        return [x.size(dim)]
    heights: list[int] = group.all_gather(torch.tensor([x.size(dim)])).tolist()
    return heights


def fetch_rows(
    x: torch.Tensor, dim: int, heights: Sequence[int], wanted: Sequence[Rows], group: _C.Communicator
) -> torch.Tensor:
    """The rows `wanted[rank]` of the whole tensor, of which rank r has heights[r] after those of the ranks before it.

    `x`: this rank's rows along `dim`; `heights` and `wanted`: of all ranks, the same on all. Ranks may want any rows,
    their own ones too; those do not travel. The gradient of a row is the sum over the ranks that got it (the true
    transpose). One all_to_all forward and one backward, of the rows that travel; none if no rank wants another's.
    Collective and blocking. Raises Error USAGE, on all ranks, for rows that there are not."""
    starts = list(itertools.accumulate(heights, initial=0))
    if len(heights) != group.size or len(wanted) != group.size:
        raise _refusal("heights", f"{group.size} ranks", f"{len(heights)} heights, {len(wanted)} wishes")
    if x.size(dim) != heights[group.rank]:
        raise _refusal("x", f"{heights[group.rank]} rows along dimension {dim}", f"shape {list(x.shape)}")
    for rank, (begin, end) in enumerate(wanted):
        if not 0 <= begin <= end <= starts[-1]:
            raise _refusal(f"rows of rank {rank}", f"within 0 to {starts[-1]}", f"{begin} to {end}")

    def shared(giver: int, taker: int) -> Rows:
        begin, end = max(starts[giver], wanted[taker][0]), min(starts[giver + 1], wanted[taker][1])
        return (begin, end) if begin < end else (starts[giver], starts[giver])

    rank, size = group.rank, group.size
    own = x.narrow(dim, shared(rank, rank)[0] - starts[rank], _length(shared(rank, rank)))
    if not any(_length(shared(giver, taker)) for giver in range(size) for taker in range(size) if giver != taker):
        return own
    given = [shared(rank, taker) if taker != rank else (starts[rank], starts[rank]) for taker in range(size)]
    taken = [_length(shared(giver, rank)) if giver != rank else 0 for giver in range(size)]
    sent = torch.cat([x.narrow(dim, begin - starts[rank], end - begin) for begin, end in given], dim)
    got = _C.all_to_all(sent, dim, dim, group, [_length(one) for one in given], taken)
    above = sum(taken[:rank])
    return torch.cat([got.narrow(dim, 0, above), own, got.narrow(dim, above, sum(taken) - above)], dim)


def halo_exchange(
    x: torch.Tensor,
    dim: int,
    before: int,
    after: int,
    group: _C.Communicator,
    heights: Sequence[int] | None = None,
) -> torch.Tensor:
    """x with the `before` rows that lie before its own and the `after` rows behind them, which other ranks have: fewer
    at the first and last rank, where the whole tensor ends. Neighbours may have fewer rows than are wanted: then they
    come from further away.

    `heights`: of all ranks, if they are known; else heights_of() asks. Gradient, calls and errors as fetch_rows()."""
    if before < 0 or after < 0:
        raise _refusal("halo", "rows from 0", f"{before} before, {after} after")
    known = heights_of(x, dim, group) if heights is None else list(heights)
    starts = list(itertools.accumulate(known, initial=0))
    wanted = [
        (max(0, begin - before), min(starts[-1], end + after)) for begin, end in zip(starts, starts[1:], strict=False)
    ]
    return fetch_rows(x, dim, known, wanted, group)


def received_rows(heights: Sequence[int], wanted: Sequence[Rows]) -> list[int]:
    """Rows that each rank receives in fetch_rows(); in its backward each rank receives what it gave. A pure
    function."""
    starts = list(itertools.accumulate(heights, initial=0))
    received = []
    for rank, (begin, end) in enumerate(wanted):
        own = max(0, min(end, starts[rank + 1]) - max(begin, starts[rank]))
        received.append(end - begin - own)
    return received


def _length(rows: Rows) -> int:
    return rows[1] - rows[0]


def _refusal(which: str, expected: str, got: str) -> _C.Error:
    return _C.make_error(
        "USAGE", "rows cannot be exchanged so", where="parallel.halo", which=which, expected=expected, got=got
    )
