"""Rows of input that rows of output need, in a convolution or a pooling over an image whose rows are split. Pure
functions."""

import dataclasses
import itertools
from collections.abc import Sequence

from zeroth import _C
from zeroth.parallel.cuts import part_sizes

__all__ = ["Window", "WindowCut"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WindowCut:
    """Who needs what. A frozen value, the same on all ranks."""

    heights: tuple[int, ...]
    """rows of the result on each rank: as equal as can be"""
    wanted: tuple[tuple[int, int], ...]
    """rows of the input that each rank needs: the first, and the one behind the last"""
    padding: tuple[tuple[int, int], ...]
    """rows that each rank adds before and after them, since the image ends there"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A window that moves along one dimension. A frozen value."""

    size: int
    stride: int = 1
    before: int = 0
    """padding at the beginning"""
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Rows from the first to the last that a window covers."""
        return self.dilation * (self.size - 1) + 1

    def height(self, rows: int) -> int:
        """Rows of the result. Raises Error USAGE if the window is larger than the padded input."""
        padded = rows + self.before + self.after
        if padded < self.reach:
            raise _C.make_error(
                "USAGE",
                "a window is larger than the image",
                where="parallel.image_window",
                expected=f"{self.reach} rows with padding",
                got=str(padded),
            )
        return (padded - self.reach) // self.stride + 1

    def cut(self, heights: Sequence[int]) -> WindowCut:
        """Of an input with so many rows on each rank. Raises Error USAGE as height()."""
        rows = sum(heights)
        outputs = part_sizes(self.height(rows), len(heights))
        starts = list(itertools.accumulate(outputs, initial=0))
        wanted, padding = [], []
        for begin, end in zip(starts, starts[1:], strict=False):
            if begin == end:
                wanted.append((0, 0))
                padding.append((0, 0))
                continue
            first = begin * self.stride - self.before
            last = (end - 1) * self.stride - self.before + self.reach
            if last <= 0 or first >= rows:  # all of it in the padding
                wanted.append((0, 0))
                padding.append((last - first, 0))
                continue
            inside = max(first, 0), min(last, rows)
            wanted.append(inside)
            padding.append((inside[0] - first, last - inside[1]))
        return WindowCut(heights=tuple(outputs), wanted=tuple(wanted), padding=tuple(padding))
