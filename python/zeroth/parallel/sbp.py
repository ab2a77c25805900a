"""How one logical tensor lies on the ranks of a group, for redistribute(): Split(dim), Broadcast, Partial."""

from __future__ import annotations

from typing import Final

from zeroth._C import Sbp

Broadcast: Final = Sbp.broadcast()
"""every rank has the tensor"""
Partial: Final = Sbp.partial()
"""the tensor is the sum of what the ranks have"""


def Split(dim: int) -> Sbp:
    """Rank r has slice r of a dim."""
    return Sbp.split(dim)
