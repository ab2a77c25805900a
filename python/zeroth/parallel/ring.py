"""Ring attention: the sequence stays split, keys and values (or queries) go around the ranks.

    rank 0          rank 1          rank 2          order "ring": keys and values travel, the output stays
    q0              q1              q2
    kv0 ---------> kv0 ---------> kv0 -->           order "token": queries travel one way, parts of the output and their
    kv2 --> ...                                     log-sum-exp come back the other way

Ref: Li et al., Sequence Parallelism (2021); Liu et al., Ring Attention (2023); Wang et al., TokenRing (2024).

Shapes: B batch, H query heads, K key and value heads, n tokens of this rank, D and E sizes of a head of q, k and of v.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from zeroth import _C
from zeroth.parallel._random import mixed
from zeroth.parallel._refuse import refuse, require_attention, who
from zeroth.parallel.blocks import BlockRule
from zeroth.parallel.layout import SequenceLayout, layout_of
from zeroth.parallel.masks import SequenceMask
from zeroth.parallel.ring_steps import Ring, RingAttention

__all__ = ["ring_attention"]

_WHERE = "parallel.ring_attention"


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: _C.Communicator,
    causal: bool = False,
    scale: float | None = None,
    layout: Literal["contiguous", "zigzag"] | SequenceLayout = "contiguous",
    order: Literal["ring", "token"] = "ring",
    *,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    mask: SequenceMask | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention over a sequence that is split over the ranks of `group`: exact, and with any number of heads.

    q: [B, H, n, D], this rank's tokens. k: [B, K, n, D], v: [B, K, n, E], with H % K == 0; they are never repeated.
    All of one dtype, on the CPU. Returns [B, H, n, E] of that dtype; softmax and sums are in float32 or wider. The
    result does not depend on `order`, but for the rounding of sums.

    causal: a query sees no later token. scale: of the scores; None: 1 / sqrt(D).
    layout: which tokens a rank has. "contiguous": the ranks' tokens follow each other; "zigzag" (see zigzag()): two
    chunks a rank, with which causal attention is as much work on each; or a layout of any ranges.
    lengths: tokens of each rank; None: as many as here. key_lengths: keys of each rank, where they are others than the
    queries (only without causal, mask and bias). mask: what a query sees besides. bias: [B or 1, H or 1, sequence,
    sequence], added to the scores, whole and equal on all ranks; its gradient is this rank's part, and needs order
    "ring". softcap: scores become softcap * tanh(scores / softcap). dropout_p: of the probabilities, with numbers that
    differ between ranks; the next draw of torch's generator, which should be restored for a recomputation, says which.

    Ring: forward receives (P - 1) / P of the sequence's k and v; backward these again and P / P of their gradients in
    float32 or wider. Token: forward receives queries and outputs of (P - 1) / P of the sequence, one way each.

    A call of all ranks of the group, in forward and in backward; blocks. Raises Error USAGE for what does not fit."""
    _check(q, k, v, group, order, bias)
    q_lengths = list(lengths) if lengths is not None else [q.shape[2]] * group.size
    queries = layout if isinstance(layout, SequenceLayout) else layout_of(layout, q_lengths, where=_WHERE)
    keys = queries
    if key_lengths is not None or k.shape[2] != q.shape[2]:
        if causal or mask is not None or bias is not None:
            refuse(
                "there are other numbers of queries and keys, so a mask has no meaning",
                where=_WHERE,
                who=who(group),
                which="causal" if causal else "mask or bias",
                expected=f"{q.shape[2]} keys on this rank, as its queries",
                got=k.shape[2],
            )
        keys = layout_of("contiguous", key_lengths or [k.shape[2]] * group.size, where=_WHERE)
    for name, tensor, tokens in (("q", q, queries), ("k", k, keys)):
        if len(tokens.chunks) != group.size or tokens.lengths[group.rank] != tensor.shape[2]:
            refuse(
                "a rank has other tokens than the layout gives it",
                where=_WHERE,
                who=who(group),
                which=name,
                expected=f"{tokens.lengths} tokens on {group.size} ranks",
                got=f"{tensor.shape[2]} tokens here",
                hint="pass the tokens of each rank as lengths",
            )
    whole = [queries.length, keys.length]
    if bias is not None and list(bias.shape[2:]) != whole:
        refuse("a bias is not of the whole sequence", where=_WHERE, which="bias", expected=whole, got=list(bias.shape))
    mask = SequenceMask(is_causal=causal) & (mask or SequenceMask())
    rule = BlockRule(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask,
        softcap=softcap,
        bias=bias.detach() if bias is not None else None,
        dropout_p=dropout_p,
    )
    ring = Ring(group=group, queries=queries, keys=keys, rule=rule, order=order, seeds=_seeds(group, dropout_p))
    return RingAttention.apply(q, k, v, bias, ring)  # type: ignore[no-any-return]


def _seeds(group: _C.Communicator, dropout_p: float) -> list[int]:
    """One of each rank, all different."""
    if dropout_p == 0.0:
        return [0] * group.size
    own = torch.randint(1 << 62, (1,), dtype=torch.int64)
    return [mixed(seed, rank) for rank, seed in enumerate(group.all_gather(own).tolist())]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _C.Communicator, order: str, bias: torch.Tensor | None
) -> None:
    require_attention(q, k, v, where=_WHERE, who=who(group))
    if order not in ("ring", "token"):
        refuse("there is no such order", where=_WHERE, which="order", expected="ring or token", got=order)
    if bias is not None and (
        bias.dim() != 4 or bias.shape[0] not in (1, q.shape[0]) or bias.shape[1] not in (1, q.shape[1])
    ):
        refuse(
            "a bias does not fit the queries",
            where=_WHERE,
            who=who(group),
            which="bias",
            expected=f"[1 or {q.shape[0]}, 1 or {q.shape[1]}, sequence, sequence]",
            got=list(bias.shape),
        )
    if bias is not None and bias.requires_grad and order == "token":
        refuse(
            "a bias gets no gradient in this order",
            where=_WHERE,
            who=who(group),
            which="bias",
            expected='order "ring" for a bias that requires grad',
            got='order "token"',
        )
