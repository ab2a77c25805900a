"""Ulysses inside, ring outside: attention on a grid of ranks.

Ulysses moves the least, but has no more ranks than heads; a ring has no such limit. On a grid the ranks of one row
(axis `ulysses`, near each other) exchange heads, and each of them is in a ring of its own with its peers of the other
rows (axis `ring`). Ref: Fang, Zhao, USP: A Unified Sequence Parallelism Approach (2024).
"""

from collections.abc import Sequence
from typing import Literal

import torch

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.parallel.heads import split_heads
from zeroth.parallel.layout import SequenceLayout, layout_of
from zeroth.parallel.masks import SequenceMask
from zeroth.parallel.ring import ring_attention
from zeroth.parallel.ulysses import ulysses_attention

__all__ = ["grid_attention"]


def grid_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ulysses: _C.Communicator,
    ring: _C.Communicator,
    causal: bool = False,
    scale: float | None = None,
    layout: Literal["contiguous", "zigzag"] | SequenceLayout = "contiguous",
    order: Literal["ring", "token"] = "ring",
    *,
    lengths: Sequence[int] | None = None,
    mask: SequenceMask | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention over a sequence that is split over ring.size * ulysses.size ranks.

    The rank with coordinates (r, u) has part u (contiguous, as equal as can be) of what `layout` gives rank r of a
    ring; on_grid() cuts so. Arguments and result are those of ring_attention() and ulysses_attention(); lengths:
    tokens of each rank, u fastest; None: as many as here; layout: of the ring, over the tokens of its rows. Heads are
    split over `ulysses` only: H >= ulysses.size. A call of all ranks of both groups."""
    every = [q.shape[2]] * (ring.size * ulysses.size) if lengths is None else list(lengths)
    if len(every) != ring.size * ulysses.size:
        refuse(
            "lengths are not one a rank of the grid",
            where="parallel.grid_attention",
            which="lengths",
            expected=f"{ring.size * ulysses.size} numbers of tokens",
            got=every,
        )
    rows = [every[row * ulysses.size : (row + 1) * ulysses.size] for row in range(ring.size)]
    outer = layout
    if not isinstance(outer, SequenceLayout):
        outer = layout_of(outer, [sum(row) for row in rows], where="parallel.grid_attention")

    own_bias = None if bias is None else _of_own_heads(bias, q.shape[1], k.shape[1], ulysses)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(
            q, k, v, ring, causal, scale, outer, order, mask=mask, bias=own_bias, softcap=softcap, dropout_p=dropout_p
        )

    return ulysses_attention(q, k, v, attend, ulysses, lengths=rows[ring.rank], grouped=True)


def _of_own_heads(bias: torch.Tensor, num_heads: int, num_kv_heads: int, group: _C.Communicator) -> torch.Tensor:
    """The bias of the heads that this rank has inside: a row of the grid has all keys in turn."""
    if bias.dim() != 4 or bias.shape[1] not in (1, num_heads):
        refuse(
            "a bias does not fit the queries",
            where="parallel.grid_attention",
            which="bias",
            expected=f"[batch or 1, 1 or {num_heads}, sequence, sequence]",
            got=list(bias.shape),
        )
    own = split_heads(num_heads, num_kv_heads, group.size).q[group.rank]
    return bias if bias.shape[1] == 1 else bias[:, own.start : own.stop]
