"""Which part of a tensor a rank has: values, no ranks needed."""

import dataclasses

import torch
from torch import nn

from zeroth import _C
from zeroth._C import slice_sizes

__all__ = ["Cut", "cut_of", "note_cut"]

_CUT = "_zeroth_cut"


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks of an axis share one dimension of a tensor."""

    axis: str
    """of the mesh"""
    rank: int
    ranks: int
    grain: int = 1
    """indices that stay together: the size of a head"""
    copies: int = 1
    """so many neighbours have the same part"""
    parts: int = 1
    """the dimension is so many equal blocks, each of which is shared like this: query, key and value in one matrix"""
    further: tuple[str, ...] = ()
    """more axes of the mesh, inside of `axis`: the ranks are those of all of them"""

    def sizes(self, length: int) -> list[int]:
        """Indices of each rank, of a block of `length`."""
        return [size for size in self._different(length) for _ in range(self.copies)]

    def range_of(self, length: int) -> tuple[int, int]:
        """Where this rank's indices of a block of `length` begin, and how many there are."""
        sizes, own = self._different(length), self.rank // self.copies
        return sum(sizes[:own]), sizes[own]

    def _different(self, length: int) -> list[int]:
        """Of ranks that have different indices."""
        return [size * self.grain for size in slice_sizes(length // self.grain, self.ranks // self.copies)]

    def take(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, a contiguous copy."""
        dim %= whole.dim()
        begin, count = self.range_of(whole.shape[dim] // self.parts)
        blocks = whole.reshape(*whole.shape[:dim], self.parts, -1, *whole.shape[dim + 1 :])
        part = blocks.narrow(dim + 1, begin, count).flatten(dim, dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def box(self, whole: tuple[int, ...], dim: int) -> _C.ParameterBox:
        """Of a parameter whose dimension `dim` ranks share so."""
        dim %= len(whole)
        begin, _ = self.range_of(whole[dim] // self.parts)
        offset = [0] * len(whole)
        offset[dim] = begin
        return _C.ParameterBox(
            whole, offset, distinct=self.axis, copies=self.copies, parts_dim=dim, parts=self.parts, further=self.further
        )


def note_cut(parameter: nn.Parameter, cut: Cut, dim: int) -> None:
    """That the parameter is this part of a whole one."""
    setattr(parameter, _CUT, (cut, dim))


def cut_of(parameter: nn.Parameter) -> tuple[Cut, int] | None:
    """What note_cut() noted."""
    return getattr(parameter, _CUT, None)
