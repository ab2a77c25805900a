"""A batch of whole sequences, and the part of it that a rank has: pure functions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from zeroth import _C
from zeroth.parallel.cuts import Layout, sequence_indices

__all__ = ["cut_batch", "shifted_labels", "whole_batch"]


def whole_batch(
    batch: Mapping[str, Any], *, multiple: int = 1, pad_id: int = 0, ignore_index: int = -100
) -> dict[str, Any]:
    """A batch with all that a cut needs, still of whole sequences.

    `batch`: input_ids int [B, S]; if they are there: position_ids [B or 1, S], or [S], which start again at each
    document of a packed row; labels [B, S], where a position's label is its own token; shift_labels [B, S], where it is
    the token that follows; attention_mask [B, S] of ones, with zeros on the right only; cu_seq_lens...; and anything
    else.
    Returns input_ids, position_ids (0, 1, ... if they were not there), labels and shift_labels (the same tensor: the
    token that follows in the same document, else ignore_index) if there were any, and the rest as it was. The mask is
    gone: nothing before the padding sees it under a causal mask, and its labels do not count. S is padded on the right
    to a multiple, by a document of its own if the row is packed.
    Raises Error USAGE, by name."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise _refusal("a batch has no sequences to cut", "input_ids", "int [B, S]", got)
    if multiple < 1:
        raise _refusal("sequences cannot be padded so", "multiple", "1 or more", str(multiple))
    rows, length = ids.shape
    more = -length % multiple
    kept = _kept(batch.get("attention_mask"), ids)
    positions = _positions(batch.get("position_ids"), ids)
    result: dict[str, Any] = {
        name: _padded(name, value, rows, length, more)
        for name, value in batch.items()
        if name not in ("input_ids", "position_ids", "labels", "shift_labels", "attention_mask")
    }
    result["input_ids"] = functional.pad(ids, (0, more), value=pad_id)
    labels = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = shifted_labels(batch["labels"], positions, ignore_index, kept)
    if labels is not None:
        if labels.shape != ids.shape:
            raise _refusal("labels are not one a token", "labels", str(list(ids.shape)), str(list(labels.shape)))
        labels = functional.pad(labels, (0, more), value=ignore_index)
        result["labels"] = result["shift_labels"] = labels
    if more:
        packed = bool((positions.diff(dim=-1) != 1).any())
        start = 0 if packed else length
        pad = torch.arange(start, start + more, device=ids.device, dtype=positions.dtype)
        positions = torch.cat([positions, pad.expand(rows, more)], 1)
    result["position_ids"] = positions
    return result


def shifted_labels(
    labels: torch.Tensor, positions: torch.Tensor, ignore_index: int = -100, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Labels [B, S] of the same tokens, shifted: each position has the label of the one that follows it in its
    document. `positions` [B, S]: a step other than +1 starts a document. `kept`: bool [B, S]; tokens that are padding
    are nobody's label."""
    own = labels if kept is None else labels.where(kept, ignore_index)
    following = functional.pad(own[:, 1:], (0, 1), value=ignore_index)
    ends = functional.pad(positions.diff(dim=-1) != 1, (0, 1), value=True)
    return following.masked_fill(ends, ignore_index)


def cut_batch(whole: Mapping[str, Any], ranks: int, rank: int, layout: Layout = "contiguous") -> dict[str, Any]:
    """What a rank has of a whole_batch(): of each tensor [B, S, ...] its positions, and everything else as it is.
    Tensors are copies. Raises Error USAGE as sequence_indices()."""
    ids = whole["input_ids"]
    index = sequence_indices(ids.size(1), ranks, rank, layout).to(ids.device)
    cut: dict[int, torch.Tensor] = {}  # a tensor under two names stays one

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape[:2] != ids.shape:
            return value
        return cut.setdefault(id(value), value.index_select(1, index))

    return {name: part(value) for name, value in whole.items()}


def _refusal(message: str, which: str, expected: str, got: str, hint: str = "") -> _C.Error:
    return _C.make_error(
        "USAGE", message, where="parallel.cut_batch", which=which, expected=expected, got=got, hint=hint
    )


def _kept(mask: Any, ids: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise _refusal(
            "a mask of pairs of tokens cannot be cut",
            "attention_mask",
            f"{list(ids.shape)}, zero where padding is",
            str(list(mask.shape)) if isinstance(mask, torch.Tensor) else type(mask).__name__,
            "documents of a packed row: position_ids that start again",
        )
    kept = mask.bool()
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise _refusal(
            "padding before tokens cannot be cut",
            "attention_mask",
            "ones, then zeros",
            "a zero before a one",
            "pad on the right",
        )
    return kept


def _positions(positions: Any, ids: torch.Tensor) -> torch.Tensor:
    if positions is None:
        return torch.arange(ids.size(1), device=ids.device).expand(ids.shape).contiguous()
    if isinstance(positions, torch.Tensor) and positions.dim() <= 2 and positions.size(-1) == ids.size(1):
        if positions.dim() == 1 or positions.size(0) in (1, ids.size(0)):
            return positions.expand(ids.shape).contiguous()
    got = str(list(positions.shape)) if isinstance(positions, torch.Tensor) else type(positions).__name__
    raise _refusal("positions are not one a token", "position_ids", str(list(ids.shape)), got)


def _padded(name: str, value: Any, rows: int, length: int, more: int) -> Any:
    if more == 0 or not isinstance(value, torch.Tensor):
        return value
    if value.shape[:2] == (rows, length):
        return functional.pad(value, (0, 0) * (value.dim() - 2) + (0, more))
    if name.startswith("cu_seq") and value.dim() == 1 and value.numel() > 0 and int(value[-1]) == length:
        return torch.cat([value, value[-1:] + more])
    return value
