"""Ulysses: each rank has all heads of a part of the sequence, but for the attention, which has the whole sequence of a
part of the heads. An all_to_all leads there, and one back. Ref: Jacobs et al., DeepSpeed Ulysses (2023).

Shapes: B batch, H query heads, K key and value heads, n tokens of this rank, S of all, D and E sizes of a head of q, k
and of v; h and j: query and key heads of this rank.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from zeroth import _C
from zeroth._C import all_to_all
from zeroth.parallel._random import split_random
from zeroth.parallel._refuse import refuse, require_attention, who
from zeroth.parallel.heads import HeadSplit, split_heads

__all__ = ["ulysses_attention"]

_WHERE = "parallel.ulysses_attention"


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attend: Callable[..., torch.Tensor] | None,
    group: _C.Communicator,
    *,
    lengths: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
    grouped: bool = False,
) -> torch.Tensor:
    """Any attention over a sequence that is split over the ranks of `group`.

    q: [B, H, n, D], this rank's tokens. k: [B, K, n, D], v: [B, K, n, E], with H % K == 0 and H >= ranks. Returns
    [B, H, n, E'], with the last size that `attend` gives.
    attend: called with q [B, h, S, D], k [B, h, S, D] and v [B, h, S, E] of the whole sequence, tokens in rank order,
    and with the bias of its heads if there is one; returns [B, h, S, E']. None: torch's scaled_dot_product_attention.
    Random numbers inside it differ between the ranks, as dropout of other heads must.
    grouped: k and v come as [B, j, S, ...] where each of the j heads has h / j query heads in order; else, and where
    heads are split unevenly, repeated for each query head.
    lengths: tokens of each rank; None: as many as here.
    bias: a mask or bias, in one of three forms: of the whole sequence and all heads, equal on all ranks, [B or 1, H or
    1, S, S]; of the whole sequence and this rank's heads, [B or 1, h, S, S]; of this rank's queries, [B or 1, H or 1,
    n, S]. Gradients flow to it; in the first form they are this rank's part.

    Heads that H / ranks does not divide are cut +-1; key and value heads go to each rank that has query heads of
    theirs. Receives (2 H + 2 K) / H * B * S * H * D / P * (P - 1) / P elements in forward and as many in backward (K
    <= P: with each rank's copies for K).

    A call of all ranks of the group, in forward and in backward; blocks. Raises Error USAGE for what does not fit."""
    every = _check(q, k, v, group, lengths)
    heads = split_heads(q.shape[1], k.shape[1], group.size, where=_WHERE)
    rank = group.rank
    if group.size > 1:
        q, k, v = _to_heads(q, k, v, heads, every, group)
    if not (grouped and heads.is_grouped(rank)) and k.shape[1] != q.shape[1]:
        order = torch.tensor(heads.kv_of_q(rank), device=k.device)
        k, v = k.index_select(1, order), v.index_select(1, order)
    extra = [] if bias is None else [_own_bias(bias, heads, every, group)]
    with split_random(group):
        out = (attend or _plain)(q, k, v, *extra)
    if out.shape[:3] != q.shape[:3]:
        refuse(
            "an attention function returned another shape",
            where=_WHERE,
            who=who(group),
            which="attend",
            expected=f"{list(q.shape[:3])} and the size of a head",
            got=list(out.shape),
        )
    if group.size == 1:
        return out
    return all_to_all(out, 2, 1, group, split_sizes=every, concat_sizes=heads.q_counts())


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1])


def _to_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: HeadSplit, lengths: list[int], group: _C.Communicator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One exchange for all three where heads are of one size."""
    q_counts, kv_counts = heads.q_counts(), heads.kv_counts()
    order = heads.kv_order()
    if order != list(range(k.shape[1])):
        index = torch.tensor(order, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        return (
            all_to_all(q, 1, 2, group, split_sizes=q_counts, concat_sizes=lengths),
            all_to_all(k, 1, 2, group, split_sizes=kv_counts, concat_sizes=lengths),
            all_to_all(v, 1, 2, group, split_sizes=kv_counts, concat_sizes=lengths),
        )
    parts = zip(torch.split(q, q_counts, 1), torch.split(k, kv_counts, 1), torch.split(v, kv_counts, 1), strict=True)
    counts = [a + 2 * b for a, b in zip(q_counts, kv_counts, strict=True)]
    together = all_to_all(
        torch.cat([tensor for part in parts for tensor in part], 1),
        1,
        2,
        group,
        split_sizes=counts,
        concat_sizes=lengths,
    )
    own = kv_counts[group.rank]
    q, k, v = torch.split(together, [q_counts[group.rank], own, own], 1)
    return q, k, v


def _own_bias(bias: torch.Tensor, heads: HeadSplit, lengths: list[int], group: _C.Communicator) -> torch.Tensor:
    """Of this rank's heads and the whole sequence."""
    whole, own = sum(lengths), heads.q[group.rank]
    num_heads = sum(heads.q_counts())
    if bias.dim() == 4 and bias.shape[3] == whole and bias.shape[1] in (1, num_heads, len(own)):
        if bias.shape[2] == whole:
            return bias[:, own.start : own.stop] if bias.shape[1] == num_heads else bias
        if bias.shape[2] == lengths[group.rank] and bias.shape[1] == num_heads:
            return all_to_all(bias, 1, 2, group, split_sizes=heads.q_counts(), concat_sizes=lengths)
        if bias.shape[2] == lengths[group.rank] and bias.shape[1] == 1:
            spread = bias.expand(-1, group.size, -1, -1)
            return all_to_all(spread, 1, 2, group, split_sizes=[1] * group.size, concat_sizes=lengths)
    refuse(
        "a bias fits neither the whole sequence nor this rank's queries",
        where=_WHERE,
        who=who(group),
        which="bias",
        expected=f"[batch or 1, 1, {len(own)} or {num_heads}, {whole} or {lengths[group.rank]}, {whole}]",
        got=list(bias.shape),
    )


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _C.Communicator, lengths: Sequence[int] | None
) -> list[int]:
    """Tokens of each rank."""
    require_attention(q, k, v, where=_WHERE, who=who(group))
    if q.shape[2] != k.shape[2]:
        refuse(
            "there are other numbers of queries and keys",
            where=_WHERE,
            who=who(group),
            which="q and k",
            expected="tokens of one sequence",
            got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        )
    every = [q.shape[2]] * group.size if lengths is None else list(lengths)
    if len(every) != group.size or every[group.rank] != q.shape[2]:
        refuse(
            "this rank has other tokens than lengths say",
            where=_WHERE,
            who=who(group),
            which="lengths",
            expected=f"one number a rank, and {q.shape[2]} for this one",
            got=every,
        )
    return every
