"""Of a whole sample, what each rank keeps: its tokens, and its labels, which were shifted before.

Shapes: B batch, S tokens of the whole sequence, n of this rank.
"""

from collections.abc import Mapping
from typing import Any

import torch

from zeroth.parallel import layout as layouts
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.hf_attention import SequenceBinding, SplitMask
from zeroth.parallel.layout import SequenceLayout
from zeroth.parallel.masks import SequenceMask, documents_of, documents_of_boundaries
from zeroth.parallel.sample import IGNORED, Sample, pad_to, shifted
from zeroth.parallel.split_checks import ALIGNED, CONSUMED

__all__ = ["cut_sample", "layout_of_sample"]

_WHERE = "parallel.split_sequence"


def cut_sample(
    given: Mapping[str, Any], binding: SequenceBinding, kind: str, loss_type: str
) -> tuple[dict[str, Any], Sample]:
    """The arguments of this rank's tokens, and what one forward needs to know of the whole. given: arguments that
    require_known() has seen; kind: of the layout; loss_type: as transformers names it."""
    tokens: torch.Tensor = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    batch, length = tokens.shape[:2]
    padded, layout, outer = layout_of_sample(length, binding, kind)
    positions = given.get("position_ids")
    mask = given.get("attention_mask")
    documents = None
    if given.get("cu_seq_lens_q") is not None:
        documents = documents_of_boundaries(given["cu_seq_lens_q"], length)
    elif positions is not None and mask is None:
        documents = documents_of(positions if positions.dim() == 2 else positions[0])
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    labels, valid = _labels(given, padded, loss_type)
    rank = binding.group.rank
    sample = Sample(
        layout=layout,
        outer=outer,
        length=length,
        positions=pad_to(positions, -1, padded),
        documents=None if documents is None else pad_to(documents, 1, padded, -1),
        labels=None if labels is None else layout.cut(labels, 1, rank),
        valid=valid,
    )
    local = {name: value for name, value in given.items() if name not in CONSUMED}
    for name in ("input_ids", "inputs_embeds", "token_type_ids"):
        if local.get(name) is not None:
            local[name] = layout.cut(pad_to(local[name], 1, padded), 1, rank)
    local["position_ids"] = layout.cut(sample.positions, -1, rank)
    local["attention_mask"] = _mask(mask, batch, length, sample, who(binding.group))
    return local, sample


def layout_of_sample(length: int, binding: SequenceBinding, kind: str) -> tuple[int, SequenceLayout, SequenceLayout]:
    """Tokens with those that fill up: none, where each chunk has one. Layout over all ranks, and over a ring."""
    cut = layouts.zigzag if kind == "zigzag" else layouts.contiguous
    grid, ring = binding.ulysses, binding.ring
    ranks = binding.group.size
    padded = max(length, 2 * ranks if kind == "zigzag" else ranks)
    if grid is None or ring is None:
        whole = cut(padded, ranks)
        return padded, whole, whole
    outer = cut(padded, ring.size)
    return padded, layouts.on_grid(outer, grid.size), outer


def _labels(given: Mapping[str, Any], padded: int, loss_type: str) -> tuple[torch.Tensor | None, float]:
    """Of the whole sequence, each at the token that predicts it; and what the loss is divided by."""
    labels = given.get("shift_labels")
    if labels is None and given.get("labels") is not None:
        labels = given["labels"] if loss_type in ALIGNED else shifted(given["labels"])
    if labels is None:
        return None, 0.0
    ignored = given.get("ignore_index")
    if ignored is not None and ignored != IGNORED:
        labels = labels.masked_fill(labels == ignored, IGNORED)
    items = given.get("num_items_in_batch")
    valid = float(items) if items is not None else float(max(int((labels != IGNORED).sum()), 1))
    return pad_to(labels, 1, padded, IGNORED), valid


def _mask(mask: Any, batch: int, length: int, sample: Sample, rank: str) -> Any:
    """What the model makes its masks from: one of the keys of the whole sequence, or a prepared one."""
    if isinstance(mask, Mapping):
        return {name: _mask(one, batch, length, sample, rank) for name, one in mask.items()}
    padded = sample.layout.length
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool, device=sample.positions.device)
    if mask.dim() == 2 and mask.shape == (batch, length):
        return pad_to(mask, 1, padded)
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[2:] != (length, length):
        refuse(
            "a mask is not of the whole sequence",
            where=_WHERE,
            who=rank,
            which="attention_mask",
            expected=f"[{batch}, {length}] or [1 or {batch}, 1 or heads, {length}, {length}]",
            got=list(mask.shape),
        )
    if mask.dtype == torch.bool and mask.shape[1] > 1:
        mask = torch.zeros(mask.shape, device=sample.positions.device).masked_fill(~mask, -torch.inf)
    if mask.dtype == torch.bool:
        seen = pad_to(pad_to(mask, 2, padded), 3, padded)
        return SplitMask(SequenceMask.matrix(seen), sample.layout, sample.outer)
    bias = pad_to(pad_to(mask, 2, padded), 3, padded, -torch.inf)
    return SplitMask(SequenceMask(), sample.layout, sample.outer, bias)
