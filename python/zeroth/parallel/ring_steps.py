"""The steps of ring attention, forward and backward. See ring.py.

Shapes: B batch, H query heads, K key and value heads, n tokens of this rank, D and E sizes of a head of q, k and of v.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zeroth import _C
from zeroth.parallel import _wire
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
from zeroth.parallel.layout import SequenceLayout

__all__ = ["Ring", "RingAttention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
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
        self,
        grad: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        whole: Part,
        into: Gradients,
        q_rank: int,
        k_rank: int,
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


class RingAttention(torch.autograd.Function):
    """forward(q, k, v, bias, ring): output of this rank's queries; backward recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, ring: Ring
    ) -> torch.Tensor:
        steps = _keys_travel if ring.order == "ring" else _queries_travel
        part = steps(ring, q, k, v)
        out = part.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, part.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        whole = Part(*_wide(out, lse))
        bias = torch.zeros_like(ring.rule.bias) if ring.rule.bias is not None and ctx.needs_input_grad[3] else None
        steps = _keys_travel_back if ring.order == "ring" else _queries_travel_back
        grads = steps(ring, grad, (q, k, v), whole, bias)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), grads.bias, None


def _keys_travel(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    rank, size, lengths = ring.group.rank, ring.group.size, ring.keys.lengths
    part = empty_part(q, v.shape[-1])
    ring.forward(q, k, v, part, rank, rank)
    message = _wire.pack([k, v]) if size > 1 else k
    for step in range(1, size):
        source = (rank - step) % size
        form = [_with_tokens(k, lengths[source]), _with_tokens(v, lengths[source])]
        (message,) = _wire.move([(message, _wire.size_of(form), 1)], ring.group)
        their_k, their_v = _wire.unpack(message, form)
        ring.forward(q, their_k, their_v, part, rank, source)
    return part


def _keys_travel_back(
    ring: Ring, grad: torch.Tensor, own: Sequence[torch.Tensor], whole: Part, bias: torch.Tensor | None
) -> Gradients:
    """Keys and values go around once more, and their gradients with them: they come home with the sums."""
    q, k, v = own
    rank, size, lengths = ring.group.rank, ring.group.size, ring.keys.lengths
    dtype = accumulation_dtype(q.dtype)
    of_q, of_k, of_v = (torch.zeros_like(tensor, dtype=dtype) for tensor in own)
    grads = Gradients(of_q, of_k, of_v, bias)
    ring.backward(grad, own, whole, grads, rank, rank)
    blocks = [k, v]
    for step in range(1, size + 1 if size > 1 else 1):  # a rank alone has them at home
        source = (rank - step) % size
        last = step == size
        travelling = [grads.k, grads.v] + ([] if last else blocks)
        form = [_with_tokens(tensor, lengths[source]) for tensor in travelling]
        grads.k, grads.v, *blocks = _wire.exchange(travelling, form, 1, ring.group)
        if not last:
            ring.backward(grad, (q, *blocks), whole, grads, rank, source)
    return grads


def _there_and_back(
    ring: Ring,
    own: Sequence[torch.Tensor],
    home: _wire.Form,
    work: Callable[[list[torch.Tensor], int], list[torch.Tensor]],
    take: Callable[[list[torch.Tensor]], None],
) -> None:
    """`own` tensors of each rank's queries go on by one rank while what `work` made of those before them goes home, the
    other way. work(tensors, their rank): an answer; take(answer): to this rank's own tensors, of the form `home`."""
    rank, size, lengths = ring.group.rank, ring.group.size, ring.queries.lengths
    if size == 1:
        return
    message, answer = _wire.pack(own), None
    for step in range(1, size + 1):
        source = (rank - step) % size
        form = [_with_tokens(tensor, lengths[source]) for tensor in own]
        moves = [(message, _wire.size_of(form), 1)] if step < size else []
        if answer is not None:
            moves.append((answer, _wire.size_of(home), 1 - step))
        came = _wire.move(moves, ring.group)
        if answer is not None:
            take(_wire.unpack(came[-1], home))
        if step < size:
            message = came[0]
            answer = _wire.pack(work(_wire.unpack(message, form), source))


def _queries_travel(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Queries go around, and their results go home."""
    rank = ring.group.rank
    part = empty_part(q, v.shape[-1])
    ring.forward(q, k, v, part, rank, rank)

    def work(queries: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        (theirs,) = queries
        of_theirs = empty_part(theirs, v.shape[-1])
        ring.forward(theirs, k, v, of_theirs, source, rank)
        return [of_theirs.out, of_theirs.lse]

    def take(answer: list[torch.Tensor]) -> None:
        merge(part, Part(*answer))

    _there_and_back(ring, [q], _wire.form_of([part.out, part.lse]), work, take)
    return part


def _queries_travel_back(
    ring: Ring, grad: torch.Tensor, own: Sequence[torch.Tensor], whole: Part, bias: torch.Tensor | None
) -> Gradients:
    """Queries go around with what their gradients need, and those go home."""
    q, k, v = own
    rank = ring.group.rank
    dtype = accumulation_dtype(q.dtype)
    grads = Gradients(*(torch.zeros_like(tensor, dtype=dtype) for tensor in own))
    ring.backward(grad, own, whole, grads, rank, rank)

    def work(travelling: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        their_q, their_grad, their_out, their_lse = travelling
        theirs = Gradients(torch.zeros_like(their_q, dtype=dtype), grads.k, grads.v)
        their_whole = Part(*_wide(their_out, their_lse))
        ring.backward(their_grad, (their_q, k, v), their_whole, theirs, source, rank)
        return [theirs.q]

    def take(answer: list[torch.Tensor]) -> None:
        grads.q += answer[0]

    travelling = [q, grad.to(q.dtype), whole.out.to(q.dtype), whole.lse]
    _there_and_back(ring, travelling, _wire.form_of([grads.q]), work, take)
    return grads
