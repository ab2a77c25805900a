"""Ring attention: the sequence stays split, keys and values (or queries) go around the ranks.

    rank 0          rank 1          rank 2          order "ring": keys and values travel, the output stays
    q0              q1              q2
    kv0 ---------> kv0 ---------> kv0 -->           order "token": queries travel one way, parts of the output and their
    kv2 --> ...                                     log-sum-exp come back the other way

Ref: Li et al., Sequence Parallelism (2021); Liu et al., Ring Attention (2023); Wang et al., TokenRing (2024).

Shapes: B batch, H query heads, K key and value heads, n tokens of this rank, D and E sizes of a head of q, k and of v.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from zeroth import _C
from zeroth.parallel import _wire
from zeroth.parallel._random import mixed
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.blocks import (
    BlockRule,
    Gradients,
    Part,
    accumulation_dtype,
    attend,
    attend_backward,
    empty_part,
    merge,
)
from zeroth.parallel.layout import SequenceLayout, layout_of
from zeroth.parallel.masks import SequenceMask

__all__ = ["ring_attention"]

_WHERE = "parallel.ring_attention"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ring:
    """What all steps of one attention need."""

    group: _C.Communicator
    queries: SequenceLayout
    keys: SequenceLayout
    rule: BlockRule
    order: str
    seeds: list[int]
    """of each rank's queries, for dropout"""

    def pairs(self, q_rank: int, k_rank: int) -> Iterator[tuple[slice, range, slice, range]]:
        """Parts of one rank's queries and another's keys, with the rows that they have there."""
        for q_rows, queries in _rows(self.queries.chunks[q_rank]):
            for k_rows, keys in _rows(self.keys.chunks[k_rank]):
                if self.rule.mask.may_see(queries, keys):
                    yield q_rows, queries, k_rows, keys

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, q_rank: int, k_rank: int) -> None:
        """Merges attention of one rank's queries to another's keys into `part`."""
        q, k, v = _wide(q, k, v)
        for q_rows, queries, k_rows, keys in self.pairs(q_rank, k_rank):
            more = attend(
                q[:, :, q_rows], k[:, :, k_rows], v[:, :, k_rows], self.rule, queries, keys, self.seeds[q_rank]
            )
            if more is not None:
                merge(Part(part.out[:, :, q_rows], part.lse[:, :, q_rows]), more)

    def backward(
        self, grad: torch.Tensor, tensors: Sequence[torch.Tensor], whole: Part, into: Gradients, q_rank: int, k_rank: int
    ) -> None:
        """Adds the gradients of one rank's queries and another's keys and values."""
        grad, q, k, v = _wide(grad, *tensors)
        for q_rows, queries, k_rows, keys in self.pairs(q_rank, k_rank):
            parts = Gradients(into.q[:, :, q_rows], into.k[:, :, k_rows], into.v[:, :, k_rows], into.bias)
            attend_backward(
                grad[:, :, q_rows],
                q[:, :, q_rows],
                k[:, :, k_rows],
                v[:, :, k_rows],
                Part(whole.out[:, :, q_rows], whole.lse[:, :, q_rows]),
                self.rule,
                queries,
                keys,
                parts,
                self.seeds[q_rank],
            )


def _rows(chunks: Sequence[range]) -> Iterator[tuple[slice, range]]:
    start = 0
    for chunk in chunks:
        yield slice(start, start + len(chunk)), chunk
        start += len(chunk)


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(accumulation_dtype(tensor.dtype)) for tensor in tensors]


def _with_tokens(tensor: torch.Tensor, tokens: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Form of the same tensor of a rank with so many tokens."""
    return (*tensor.shape[:2], tokens, *tensor.shape[3:]), tensor.dtype


class _Attention(torch.autograd.Function):
    """forward(q, k, v, bias, ring): output of this rank's queries; backward recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, ring: _Ring
    ) -> torch.Tensor:
        steps = _keys_travel if ring.order == "ring" else _queries_travel
        part = steps(ring, q, k, v)
        out = part.out.to(q.dtype)
        ctx.ring, ctx.has_bias = ring, bias is not None and bias.requires_grad
        ctx.save_for_backward(q, k, v, out, part.lse)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        whole = Part(*_wide(out, lse))
        bias = torch.zeros_like(ring.rule.bias) if ctx.has_bias and ring.rule.bias is not None else None
        steps = _keys_travel_back if ring.order == "ring" else _queries_travel_back
        grads = steps(ring, grad, (q, k, v), whole, bias)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), grads.bias, None


def _keys_travel(ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    rank, size, lengths = ring.group.rank, ring.group.size, ring.keys.lengths
    part = empty_part(q, v.shape[-1])
    ring.forward(q, k, v, part, rank, rank)
    message = _wire.pack([k, v]) if size > 1 else k
    for step in range(1, size):
        source = (rank - step) % size
        form = [_with_tokens(k, lengths[source]), _with_tokens(v, lengths[source])]
        message = _wire.shift(message, _wire.size_of(form), 1, ring.group)
        ring.forward(q, *_wire.unpack(message, form), part, rank, source)
    return part


def _keys_travel_back(
    ring: _Ring, grad: torch.Tensor, own: Sequence[torch.Tensor], whole: Part, bias: torch.Tensor | None
) -> Gradients:
    """Keys and values go around once more, and their gradients with them: they come home with the sums."""
    q, k, v = own
    rank, size, lengths = ring.group.rank, ring.group.size, ring.keys.lengths
    dtype = accumulation_dtype(q.dtype)
    grads = Gradients(*(torch.zeros_like(tensor, dtype=dtype) for tensor in own), bias)
    ring.backward(grad, own, whole, grads, rank, rank)
    blocks = [k, v]
    for step in range(1, size + 1):
        source = (rank - step) % size
        last = step == size
        travelling = [grads.k, grads.v] + ([] if step == size else blocks)
        form = [_with_tokens(tensor, lengths[source]) for tensor in travelling]
        message = _wire.shift(_wire.pack(travelling), _wire.size_of(form), 1, ring.group)
        grads.k, grads.v, *blocks = _wire.unpack(message, form)
        if not last:
            ring.backward(grad, (q, *blocks), whole, grads, rank, source)
    return grads


def _queries_travel(ring: _Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    rank, size, lengths = ring.group.rank, ring.group.size, ring.queries.lengths
    part = empty_part(q, v.shape[-1])
    ring.forward(q, k, v, part, rank, rank)
    message = _wire.pack([q]) if size > 1 else q
    for step in range(1, size):
        source, back = (rank - step) % size, [part.out, part.lse]
        form = [_with_tokens(q, lengths[source])]
        message = _wire.shift(message, _wire.size_of(form), 1, ring.group)
        (theirs,) = _wire.unpack(message, form)
        of_theirs = empty_part(theirs, v.shape[-1])
        ring.forward(theirs, k, v, of_theirs, source, rank)
        form = _wire.form_of(back)
        answer = _wire.shift(_wire.pack([of_theirs.out, of_theirs.lse]), _wire.size_of(form), -step, ring.group)
        merge(part, Part(*_wire.unpack(answer, form)))
    return part


def _queries_travel_back(
    ring: _Ring, grad: torch.Tensor, own: Sequence[torch.Tensor], whole: Part, bias: torch.Tensor | None
) -> Gradients:
    """Queries go around with what their gradients need; those come back the other way."""
    q, k, v = own
    rank, size, lengths = ring.group.rank, ring.group.size, ring.queries.lengths
    dtype = accumulation_dtype(q.dtype)
    grads = Gradients(*(torch.zeros_like(tensor, dtype=dtype) for tensor in own))
    ring.backward(grad, own, whole, grads, rank, rank)
    travelling = [q, grad.to(q.dtype), whole.out.to(q.dtype), whole.lse]
    for step in range(1, size):
        source = (rank - step) % size
        form = [_with_tokens(tensor, lengths[source]) for tensor in travelling]
        message = _wire.shift(_wire.pack(travelling), _wire.size_of(form), 1, ring.group)
        travelling = _wire.unpack(message, form)
        their_q, their_grad, their_out, their_lse = travelling
        theirs = Gradients(torch.zeros_like(their_q, dtype=dtype), grads.k, grads.v)
        their_whole = Part(*_wide(their_out, their_lse))
        ring.backward(their_grad, (their_q, k, v), their_whole, theirs, source, rank)
        form = _wire.form_of([grads.q])
        answer = _wire.shift(_wire.pack([theirs.q]), _wire.size_of(form), -step, ring.group)
        grads.q += _wire.unpack(answer, form)[0]
    return grads


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
    All of one dtype, on the CPU. Returns [B, H, n, E] of that dtype; softmax and sums are in float32 or wider. The result
    does not depend on `order`, but for the rounding of sums.

    causal: a query sees no later token. scale: of the scores; None: 1 / sqrt(D).
    layout: which tokens a rank has. "contiguous": the ranks' tokens follow each other; "zigzag" (see zigzag()): two
    chunks a rank, with which causal attention is as much work on each; or a layout of any ranges.
    lengths: tokens of each rank; None: as many as here. key_lengths: keys of each rank, where they are others than the
    queries (only without causal, mask and bias). mask: what a query sees besides. bias: [B or 1, H or 1, sequence,
    sequence], added to the scores, whole and equal on all ranks; its gradient is this rank's part, and needs order "ring".
    softcap: scores become softcap * tanh(scores / softcap). dropout_p: of the probabilities, with numbers that differ
    between ranks; the next draw of torch's generator, which should be restored for a recomputation, says which.

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
    ring = _Ring(
        group=group, queries=queries, keys=keys, rule=rule, order=order, seeds=_seeds(group, dropout_p)
    )
    return _Attention.apply(q, k, v, bias, ring)  # type: ignore[no-any-return,no-untyped-call]


def _seeds(group: _C.Communicator, dropout_p: float) -> list[int]:
    """One of each rank, all different."""
    if dropout_p == 0.0:
        return [0] * group.size
    own = torch.randint(1 << 62, (1,), dtype=torch.int64)
    return [mixed(seed, rank) for rank, seed in enumerate(group.all_gather(own).tolist())]


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _C.Communicator, order: str, bias: torch.Tensor | None
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[3] != k.shape[3]:
        refuse(
            "shapes of an attention do not fit each other",
            where=_WHERE,
            who=who(group),
            which="q, k and v",
            expected="[B, H, n, D], [B, K, n, D] and [B, K, n, E]",
            got=shapes,
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        refuse(
            "query heads do not divide into groups, one for each key and value head",
            where=_WHERE,
            who=who(group),
            which="heads",
            expected="a multiple of the key and value heads",
            got=shapes,
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        refuse(
            "an attention has several dtypes",
            where=_WHERE,
            who=who(group),
            which="q, k and v",
            expected="one floating-point dtype",
            got=f"{q.dtype}, {k.dtype}, {v.dtype}",
        )
    if order not in ("ring", "token"):
        refuse("there is no such order", where=_WHERE, which="order", expected="ring or token", got=order)
    if bias is not None and (bias.dim() != 4 or bias.shape[0] not in (1, q.shape[0]) or bias.shape[1] not in (1, q.shape[1])):
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
