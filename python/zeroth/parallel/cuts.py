"""How a length is cut over ranks: pure functions, the same on every rank.

`layout` of a sequence:
"contiguous": rank r has one slice, the slices are as equal as can be, the first ones longer by one.
"zigzag":     the sequence is cut in 2 P chunks, as equal as can be; rank r has chunks r and 2 P - 1 - r. Under a causal
              mask every rank then has the same work. Source: the striped and zig-zag orders of ring attention, after
              Brandon et al., Striped Attention, 2023, arXiv 2311.09431.
"""

from typing import Literal, TypeAlias

import torch

from zeroth import _C
from zeroth._C import slice_sizes

__all__ = ["Layout", "part_range", "part_sizes", "sequence_indices", "sequence_sizes"]

Layout: TypeAlias = Literal["contiguous", "zigzag"]

_LAYOUTS = ("contiguous", "zigzag")


def part_sizes(length: int, parts: int) -> list[int]:
    """Sizes of `parts` slices of `length` elements, as equal as can be: the first `length % parts` have one more.
    Raises Error USAGE for a negative length and for parts below 1."""
    if parts < 1 or length < 0:
        raise _C.make_error(
            "USAGE",
            "a length cannot be cut so",
            where="parallel.cuts",
            expected="a length from 0 and parts from 1",
            got=f"length {length}, parts {parts}",
        )
    return slice_sizes(length, parts)


def part_range(length: int, parts: int, part: int) -> tuple[int, int]:
    """First element of a slice, and the one behind its last. Raises Error USAGE as part_sizes(), and for a part that
    there is not."""
    sizes = part_sizes(length, parts)
    if not 0 <= part < parts:
        raise _C.make_error(
            "USAGE", "there is no such part", where="parallel.cuts", expected=f"0 to {parts - 1}", got=str(part)
        )
    begin = sum(sizes[:part])
    return begin, begin + sizes[part]


def sequence_indices(length: int, ranks: int, rank: int, layout: Layout = "contiguous") -> torch.Tensor:
    """Positions of the sequence that a rank has, in the order in which it has them: int64 [own length]. Over all ranks
    they are each position once. Raises Error USAGE for another layout, and as part_range()."""
    _require_layout(layout)
    if layout == "contiguous":
        return torch.arange(*part_range(length, ranks, rank))
    part_range(length, ranks, rank)  # refuses
    chunks = [part_range(length, 2 * ranks, chunk) for chunk in (rank, 2 * ranks - 1 - rank)]
    return torch.cat([torch.arange(*chunk) for chunk in chunks])


def sequence_sizes(length: int, ranks: int, layout: Layout = "contiguous") -> list[int]:
    """Number of positions of each rank. Raises Error USAGE as sequence_indices()."""
    _require_layout(layout)
    if layout == "contiguous":
        return part_sizes(length, ranks)
    chunks = part_sizes(length, 2 * ranks)
    return [chunks[rank] + chunks[-1 - rank] for rank in range(ranks)]


def _require_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise _C.make_error(
            "USAGE",
            "there is no such layout of a sequence",
            where="parallel.cuts",
            which="layout",
            expected=" or ".join(_LAYOUTS),
            got=repr(layout),
        )
