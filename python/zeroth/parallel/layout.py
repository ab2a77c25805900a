"""Which tokens of a sequence each rank of a group has."""

import dataclasses
from collections.abc import Sequence

import torch

from zeroth._C import slice_sizes
from zeroth.parallel._refuse import refuse

__all__ = ["SequenceLayout", "contiguous", "layout_of", "on_grid", "zigzag"]


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The tokens of each rank, as ranges of positions in the whole sequence. A frozen value; it knows no group."""

    chunks: tuple[tuple[range, ...], ...]
    """of each rank: its ranges, in the order in which the rank has them"""

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(len(chunk) for chunk in chunks) for chunks in self.chunks]

    def cut(self, whole: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """The rank's tokens of a tensor whose dimension `dim` is the whole sequence. Known to autograd; a view if they
        are one range."""
        parts = [whole.narrow(dim, chunk.start, len(chunk)) for chunk in self.chunks[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence from the tokens of rank 0, 1, ... one after another along `dim`."""
        order = [position for chunks in self.chunks for chunk in chunks for position in chunk]
        if order == list(range(len(order))):
            return parts
        place = torch.empty(len(order), dtype=torch.int64, device=parts.device)
        place[torch.tensor(order, device=parts.device)] = torch.arange(len(order), device=parts.device)
        return parts.index_select(dim, place)


def _ranges(lengths: Sequence[int]) -> list[range]:
    ranges, start = [], 0
    for length in lengths:
        ranges.append(range(start, start + length))
        start += length
    return ranges


def contiguous(length: int, ranks: int) -> SequenceLayout:
    """Rank after rank; the first `length % ranks` have one more."""
    return SequenceLayout(tuple((chunk,) for chunk in _ranges(slice_sizes(length, ranks))))


def zigzag(length: int, ranks: int) -> SequenceLayout:
    """Of 2 * ranks chunks rank r has r and 2 * ranks - 1 - r, so that a causal attention has as much to do on each."""
    chunks = _ranges(slice_sizes(length, 2 * ranks))
    return SequenceLayout(tuple((chunks[rank], chunks[2 * ranks - 1 - rank]) for rank in range(ranks)))


def on_grid(outer: SequenceLayout, inner_ranks: int) -> SequenceLayout:
    """Each rank's tokens cut once more, in their order, over `inner_ranks`: rank = outer * inner_ranks + inner."""
    every = []
    for chunks in outer.chunks:
        for part in _ranges(slice_sizes(sum(len(chunk) for chunk in chunks), inner_ranks)):
            mine, start = [], 0
            for chunk in chunks:
                low, high = max(part.start - start, 0), min(part.stop - start, len(chunk))
                if low < high:
                    mine.append(range(chunk.start + low, chunk.start + high))
                start += len(chunk)
            every.append(tuple(mine) or (range(0, 0),))
    return SequenceLayout(tuple(every))


def layout_of(kind: str, lengths: Sequence[int], *, where: str = "parallel.layout") -> SequenceLayout:
    """The layout `kind` ("contiguous" or "zigzag") in which each rank has so many tokens. Raises Error USAGE if there
    is none."""
    if kind == "contiguous":
        return SequenceLayout(tuple((chunk,) for chunk in _ranges(lengths)))
    if kind != "zigzag":
        refuse(
            "there is no such layout of a sequence",
            where=where,
            which="layout",
            expected="contiguous or zigzag",
            got=kind,
        )
    layout = zigzag(sum(lengths), len(lengths))
    if layout.lengths != list(lengths):
        refuse(
            "ranks have other tokens than the layout gives them",
            where=where,
            which="layout zigzag",
            expected=f"{layout.lengths} tokens on the ranks",
            got=list(lengths),
            hint="cut the sequence with zeroth.parallel.zigzag(length, ranks).cut(tensor, dim, rank)",
        )
    return layout
