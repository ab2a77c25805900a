"""Attention of a whole sequence on one rank, by torch's scaled_dot_product_attention, without a mask of all queries and
all keys: queries are taken in parts, each with the keys that it sees.

Shapes: B batch, H query heads, K key and value heads (H % K == 0), S tokens, D and E sizes of a head of q, k and of v.
"""

import torch
from torch.nn import functional

from zeroth.parallel.blocks import BlockRule
from zeroth.parallel.masks import Block

__all__ = ["dense_attention"]

_TILE = 1024
"""queries with a mask of their own"""


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """q [B, H, S, D], k [B, K, S, D], v [B, K, S, E] of the whole sequence in order -> [B, H, S, E]. Known to autograd,
    the bias too. A query that sees nothing gets 0."""
    whole = range(q.shape[2])
    if rule.mask.is_plain and rule.bias is None and rule.softcap is None:
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=rule.dropout_p,
            is_causal=rule.mask.is_causal,
            scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    parts = []
    for start in range(0, max(len(whole), 1), _TILE):
        tile = whole[start : start + _TILE]
        keys = range(tile.stop if rule.mask.is_causal else len(whole))
        seen = rule.mask.block(tile, keys, q.device)
        if isinstance(seen, torch.Tensor):
            columns = seen.any(dim=(0, 1, 2)).nonzero()
            keys = range(int(columns[0]), int(columns[-1]) + 1)
            seen = seen[..., keys.start : keys.stop]
        parts.append(_part(q[:, :, tile.start : tile.stop], k, v, rule, seen, tile, keys))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: BlockRule, seen: Block, queries: range, keys: range
) -> torch.Tensor:
    k, v = k[:, :, keys.start : keys.stop], v[:, :, keys.start : keys.stop]
    if not isinstance(seen, torch.Tensor):
        if seen == "none":
            return (q.sum() + v.sum()) * q.new_zeros((*q.shape[:3], v.shape[3]))
        table = None
        if seen == "causal":
            table = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=q.device).tril_()
    else:
        table = seen
    bias = None  # of the dtype of q: the kernel takes others, and reads them as numbers that they are not
    if rule.bias is not None:
        bias = rule.bias[..., queries.start : queries.stop, keys.start : keys.stop].to(q.dtype)
    grouped = q.shape[1] != k.shape[1]
    if rule.softcap is None:
        mask = table if bias is None else bias if table is None else torch.where(table, bias, -torch.inf)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=rule.dropout_p, scale=rule.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = torch.tanh(q @ k.transpose(2, 3) * (rule.scale / rule.softcap)) * rule.softcap
    if bias is not None:
        scores = scores + bias
    if table is not None:
        scores = scores.masked_fill(~table, torch.finfo(scores.dtype).min)
    chances = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if table is not None:
        chances = chances * table.any(-1, keepdim=True)
    return functional.dropout(chances.to(q.dtype), rule.dropout_p) @ v
