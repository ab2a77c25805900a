"""Attention of some queries to some keys, in parts that can be put together: online softmax.

A part is an output and the logarithm of the sum of the exponentials (lse) of its scores; two parts merge into that of
all their keys, in any order (Milakov, Gimelshein 2018; FlashAttention, Dao et al. 2022; FlashAttention-2, Dao 2023).
Backward recomputes the scores of a part from the lse of all keys.

Shapes: B batch, H query heads, K key and value heads (H % K == 0), q queries, k keys, D size of a head of q and k, E
of v.
"""

import dataclasses
from collections.abc import Iterator

import torch

from zeroth.parallel._random import mixed
from zeroth.parallel.masks import Block, SequenceMask

__all__ = ["BlockRule", "Part", "accumulation_dtype", "attend", "attend_backward", "empty_part", "merge"]

_TILE = 1024
"""queries whose scores are there at a time"""
_FUSED = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRule:
    """What an attention does besides the two products. A frozen value."""

    scale: float
    mask: SequenceMask
    softcap: float | None = None
    """scores become softcap * tanh(scores / softcap), before the mask"""
    bias: torch.Tensor | None = None
    """[B or 1, H or 1, whole sequence, whole sequence], added to the scores"""
    dropout_p: float = 0.0
    """of the probabilities"""


@dataclasses.dataclass(slots=True)
class Part:
    """Attention to some of the keys."""

    out: torch.Tensor
    """[B, H, q, E], in accumulation_dtype()"""
    lse: torch.Tensor
    """[B, H, q]; -inf where no key was seen, and out is 0 there"""


def empty_part(q: torch.Tensor, e: int) -> Part:
    """Attention to no key."""
    dtype = accumulation_dtype(q.dtype)
    shape = (*q.shape[:3], e)
    return Part(
        torch.zeros(shape, dtype=dtype, device=q.device),
        torch.full(shape[:3], -torch.inf, dtype=dtype, device=q.device),
    )


def merge(part: Part, other: Part) -> Part:
    """The part of the keys of both, in place of `part`. Ref: TokenRing, eq. of the block update."""
    top = torch.maximum(part.lse, other.lse)
    top = torch.where(top == -torch.inf, 0, top)
    own, more = (part.lse - top).exp_(), (other.lse - top).exp_()
    total = own + more
    safe = torch.where(total == 0, 1, total)
    part.out.mul_((own / safe)[..., None]).add_(other.out * (more / safe)[..., None])
    part.lse.copy_(top + total.log_())
    return part


def _tiles(
    mask: SequenceMask, queries: range, keys: range, device: torch.device
) -> Iterator[tuple[slice, range, Block]]:
    """Parts of the queries that see some of the keys: their rows, which they are, and what they see."""
    for start in range(0, len(queries), _TILE):
        tile = queries[start : start + _TILE]
        seen = _of_tile(mask, tile, keys, device)
        if not (isinstance(seen, str) and seen == "none"):
            yield slice(start, start + len(tile)), tile, seen


def _scores(
    q: torch.Tensor, k: torch.Tensor, rule: BlockRule, seen: Block, queries: range, keys: range
) -> torch.Tensor:
    """[B, H, q, k], -inf where nothing is seen."""
    scores = _by_kv_head(q, k) @ k.transpose(-1, -2)
    scores = scores.view(*q.shape[:3], k.shape[2]).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if rule.bias is not None:
        scores += rule.bias[..., queries.start : queries.stop, keys.start : keys.stop]
    if isinstance(seen, torch.Tensor):
        scores.masked_fill_(~seen, -torch.inf)
    return scores


def _by_kv_head(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, H, q, D] as [B, K, H / K * q, D]: key heads are never repeated."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _kept(rule: BlockRule, seed: int, like: torch.Tensor, queries: range, keys: range) -> torch.Tensor:
    """1 / (1 - p) where dropout keeps a probability, else 0: numbers that follow from the seed and the place."""
    generator = torch.Generator(like.device).manual_seed(mixed(seed, queries.start, keys.start))
    keep = 1.0 - rule.dropout_p
    return torch.empty_like(like).bernoulli_(keep, generator=generator).div_(keep)


def _is_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: BlockRule, seen: Block) -> bool:
    """Whether torch's own kernel, which gives the lse, computes this block."""
    return (
        _FUSED
        and isinstance(seen, str)
        and rule.softcap is None
        and rule.bias is None
        and rule.dropout_p == 0.0
        and q.device.type == "cpu"
        and q.shape[3] == v.shape[3]
    )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: BlockRule, queries: range, keys: range, seed: int = 0
) -> Part | None:
    """Attention of queries at these positions to keys at those; None if nothing is seen. q [B, H, q, D], k [B, K, k,
    D], v [B, K, k, E], in accumulation_dtype()."""
    seen = rule.mask.block(queries, keys, q.device)
    if isinstance(seen, str) and seen == "none":
        return None
    if _is_fused(q, k, v, rule, seen):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, seen == "causal", scale=rule.scale
        )
        return Part(out, lse)
    part = empty_part(q, v.shape[-1])
    for rows, tile, seen in _tiles(rule.mask, queries, keys, q.device):
        scores = _scores(q[:, :, rows], k, rule, seen, tile, keys)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)
        scores.sub_(top).exp_()
        total = scores.sum(-1, keepdim=True)
        part.lse[:, :, rows] = (top + total.log()).squeeze(-1)
        if rule.dropout_p > 0.0:
            scores.mul_(_kept(rule, seed, scores, tile, keys))
        out = (_by_kv_head(scores, k) @ v).view(*scores.shape[:3], v.shape[-1])
        part.out[:, :, rows] = out.div_(torch.where(total == 0, 1, total))
    return part


def _of_tile(mask: SequenceMask, queries: range, keys: range, device: torch.device) -> Block:
    """As block(), but with a matrix in place of "causal"."""
    seen = mask.block(queries, keys, device)
    if isinstance(seen, str) and seen == "causal":
        size = len(queries)
        return torch.ones(1, 1, size, size, dtype=torch.bool, device=device).tril_()
    return seen


@dataclasses.dataclass(slots=True)
class Gradients:
    """Of one block, to be added to."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Part,
    rule: BlockRule,
    queries: range,
    keys: range,
    into: Gradients,
    seed: int = 0,
) -> bool:
    """Adds the gradients of one block. grad [B, H, q, E]: of the output; `whole`: output and lse over all keys that the
    queries see. Returns whether anything is seen. Ref: FlashAttention-2, algorithm 2."""
    seen = rule.mask.block(queries, keys, q.device)
    if isinstance(seen, str) and seen == "none":
        return False
    if _is_fused(q, k, v, rule, seen):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, whole.out, whole.lse, 0.0, seen == "causal", scale=rule.scale
        )
        for total, part in zip((into.q, into.k, into.v), parts, strict=True):
            total += part
        return True
    lse = torch.where(whole.lse == -torch.inf, torch.inf, whole.lse)[..., None]
    delta = (grad * whole.out).sum(-1, keepdim=True)
    for rows, tile, seen in _tiles(rule.mask, queries, keys, q.device):
        scores = _scores(q[:, :, rows], k, rule, seen, tile, keys)
        slope = None if rule.softcap is None else _slope(q[:, :, rows], k, rule)
        chances = scores.sub_(lse[:, :, rows]).exp_()
        grads = _by_kv_head(grad[:, :, rows], k)
        of_chances = (grads @ v.transpose(-1, -2)).view(chances.shape)
        dropped = chances
        if rule.dropout_p > 0.0:
            kept = _kept(rule, seed, chances, tile, keys)
            dropped = chances * kept
            of_chances.mul_(kept)
        into.v += _by_kv_head(dropped, k).transpose(-1, -2) @ grads
        of_scores = of_chances.sub_(delta[:, :, rows]).mul_(chances)
        if into.bias is not None:
            rows_of_bias = into.bias[..., tile.start : tile.stop, keys.start : keys.stop]
            rows_of_bias += of_scores.sum_to_size(rows_of_bias.shape)
        if slope is not None:
            of_scores.mul_(slope)
        of_scores.mul_(rule.scale)
        into.q[:, :, rows] += (_by_kv_head(of_scores, k) @ k).view(into.q[:, :, rows].shape)
        into.k += _by_kv_head(of_scores, k).transpose(-1, -2) @ _by_kv_head(q[:, :, rows], k)
    return True


def _slope(q: torch.Tensor, k: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Derivative of the capped scores by the scores."""
    assert rule.softcap is not None
    scores = (_by_kv_head(q, k) @ k.transpose(-1, -2)).view(*q.shape[:3], k.shape[2]).mul_(rule.scale)
    return 1 - scores.div_(rule.softcap).tanh_().square_()
