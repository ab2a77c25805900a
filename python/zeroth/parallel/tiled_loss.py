"""Head and cross entropy over tiles: the logits of a sequence never exist, those of one tile do.

Source: ALST, Bekman et al., Arctic Long Sequence Training, 2025, arXiv 2506.13996 (tiled logits and loss). The gradient
is computed with the loss, where the logits are: softmax minus one, in their memory. So the head is multiplied three
times, as without tiles, and backward only multiplies by the gradient that comes in."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from zeroth import _C
from zeroth.parallel.cuts import part_sizes
from zeroth.parallel.tile_runs import agree_on_tiles, wide_dtype

__all__ = ["LogitStep", "logit_steps", "tiled_loss", "tiled_loss_sum"]

LogitStep: TypeAlias = float | None
"""what a model does to its logits, element by element: a factor, or None for tanh"""


def logit_steps(scale: float = 1.0, softcap: float | None = None) -> tuple[LogitStep, ...]:
    """scale * z, and then softcap * tanh(z / softcap), as Cohere's and Gemma's models have them."""
    steps: tuple[LogitStep, ...] = () if scale == 1.0 else (scale,)
    return steps if softcap is None else (*steps, 1.0 / softcap, None, softcap)


def tiled_loss(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    tiles: int | None = None,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    softcap: float | None = None,
    num_valid: torch.Tensor | float | None = None,
    group: _C.Communicator | None = None,
    vocab_group: _C.Communicator | None = None,
    vocab_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Mean cross entropy of hidden @ head_weight.T (+ bias) against labels: that of F.cross_entropy in float32 (float64
    for float64), with the logits of one tile alive.

    `hidden`: [..., h]; `head_weight`: [V, h]; `bias`: [V]; `labels`: int64 [...], shifted already: the label of a
    position is what it predicts; `ignore_index` counts for nothing. `tiles`: default ceil(tokens / h), so that a tile's
    logits are as large as the weight. `scale`, `softcap`: logit_steps(). `num_valid`: what the sum is divided by;
    default the number of labels that count, of all ranks of `group`; 0 of them give the loss 0.
    `group`: ranks with other parts of the sequence. Then the value is the loss of all parts, on every rank, and the
    gradient is that of this rank's part: the sum over the ranks is the whole. One all_reduce of 8 bytes and one of the
    loss.
    `vocab_group`: ranks that share the vocabulary: `head_weight` and `bias` are this rank's part, of vocab_sizes[rank]
    rows (default: they ask), hidden and labels are the same on all. Logits never move: two all_reduces a tile, of 1 and
    2 numbers a token; the gradient of hidden is summed over them in backward. They agree on `tiles` first.
    Memory beside the result: s V / tiles logits, in float32 or float64, twice with `softcap`; 16-bit ones beside them
    if `hidden` has 16 bits; and from here to backward the gradients of hidden and of the weight (in float32 for 16-bit
    ones). At stage 3 the weight must be gathered: inside the model's forward, or in engine.gathered(model.lm_head).
    Raises Error USAGE, by name, for shapes and dtypes that do not fit and labels outside of the vocabulary."""
    total, valid = tiled_loss_sum(
        hidden,
        head_weight,
        labels,
        tiles,
        bias=bias,
        ignore_index=ignore_index,
        steps=logit_steps(scale, softcap),
        vocab_group=vocab_group,
        vocab_sizes=vocab_sizes,
    )
    if num_valid is None:
        counted = torch.tensor([valid])
        if group is not None:
            group.all_reduce(counted)
        num_valid = float(max(1, int(counted)))
    loss = total / num_valid
    if group is None or group.size == 1:
        return loss
    from zeroth.parallel import reduce_from_group

    return reduce_from_group(loss, group)


def tiled_loss_sum(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    tiles: int | None = None,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    steps: Sequence[LogitStep] = (),
    vocab_group: _C.Communicator | None = None,
    vocab_sizes: Sequence[int] | None = None,
) -> tuple[torch.Tensor, int]:
    """The sum of this rank's losses, a scalar, and the number of labels that count. Arguments, memory and errors as
    tiled_loss(); `steps`: what the model does to its logits. Without a gradient nothing but the sum is kept."""
    part = _part_of(head_weight, vocab_group, vocab_sizes)
    _require(hidden, head_weight, labels, bias, ignore_index, head_weight.size(0) if part is None else part.size)
    if part is not None:
        hidden = _C.copy_to_group(hidden, part.group)
    tokens, features = math.prod(hidden.shape[:-1]), hidden.shape[-1]
    wanted = -(-tokens // max(1, features))
    tiles = agree_on_tiles(tiles, wanted, None if part is None else part.group)
    sizes = part_sizes(tokens, max(1, min(tiles, tokens)))
    flat = labels.reshape(-1)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as autocast would for a product
        narrow = torch.get_autocast_dtype(kind)
        hidden, head_weight = hidden.to(narrow), head_weight.to(narrow)
        bias = None if bias is None else bias.to(narrow)
    with torch.autocast(kind, enabled=False):
        total: torch.Tensor = _TiledLoss.apply(
            hidden.reshape(tokens, features), head_weight, bias, flat, sizes, ignore_index, tuple(steps), part
        )
    return total, int((flat != ignore_index).sum())


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Of a vocabulary that ranks share."""

    group: _C.Communicator
    begin: int
    count: int
    size: int
    """of the whole vocabulary"""


def _part_of(weight: torch.Tensor, group: _C.Communicator | None, sizes: Sequence[int] | None) -> _Part | None:
    if group is None or group.size == 1:
        return None
    every = list(sizes) if sizes is not None else group.all_gather(torch.tensor([weight.size(0)])).tolist()
    if len(every) != group.size or every[group.rank] != weight.size(0):
        raise _refusal(
            "the head is not this rank's part of the vocabulary",
            "vocab_sizes",
            f"one a rank of {group.size}, {weight.size(0)} for rank {group.rank}",
            str(every),
        )
    return _Part(group, sum(every[: group.rank]), every[group.rank], sum(every))


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        sizes: list[int],
        ignore_index: int,
        steps: tuple[LogitStep, ...],
        part: _Part | None,
    ) -> torch.Tensor:
        wide = wide_dtype(hidden.dtype)
        wants = ctx.needs_input_grad[:3]
        of_hidden = torch.zeros_like(hidden) if wants[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if wants[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if wants[2] and bias is not None else None
        total = hidden.new_zeros((), dtype=wide)
        begin = 0
        for size in sizes:
            rows, own = hidden.narrow(0, begin, size), labels.narrow(0, begin, size)
            counts = own != ignore_index
            begin += size
            if not counts.any():
                continue  # a prompt, or padding: no product at all
            targets = own.where(counts, 0).unsqueeze(1)
            logits = torch.nn.functional.linear(rows, weight, bias).to(wide)
            kept = _do(steps, logits)
            loss, logits = _cross_entropy(logits, targets, counts, part)
            total += loss
            if not any(wants):
                continue
            _undo(steps, logits, kept)
            narrow = logits.to(hidden.dtype)
            if of_bias is not None:
                of_bias += logits.sum(0)
            del kept, logits
            if of_hidden is not None:
                torch.mm(narrow, weight, out=of_hidden.narrow(0, begin - size, size))
            if of_weight is not None:
                if of_weight.dtype == narrow.dtype:
                    of_weight.addmm_(narrow.t(), rows)
                else:
                    of_weight += narrow.t() @ rows
            del narrow
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Sums over tokens, not means: the loss scale of fp16 comes in time for 16-bit ones.
        scaled = [
            None if one is None else (one * gradient.to(wide_dtype(one.dtype))).to(one.dtype)
            for one in ctx.saved_tensors
        ]
        return (*scaled, None, None, None, None, None)


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, part: _Part | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of the rows that count, and its gradient to the logits, in their memory."""
    here = None
    if part is not None:  # targets of other ranks' parts: any column, with weight zero
        targets = targets - part.begin
        here = (targets >= 0) & (targets < part.count)
        targets = targets.where(here, 0)
    chosen = logits.gather(1, targets)
    largest = logits.amax(1, keepdim=True)
    if part is not None:
        part.group.all_reduce(largest, "max")
    sums = logits.sub_(largest).exp_().sum(1, keepdim=True)
    if part is not None and here is not None:
        both = part.group.all_reduce(torch.cat([sums, chosen * here], 1))
        sums, chosen = both[:, :1], both[:, 1:]
    losses = sums.log() + largest - chosen
    loss = losses.where(counts.unsqueeze(1), 0).sum()
    logits.div_(sums)
    logits.scatter_add_(1, targets, torch.full_like(chosen, -1.0) if here is None else -here.to(logits.dtype))
    return loss, logits.mul_(counts.unsqueeze(1))


def _do(steps: Sequence[LogitStep], logits: torch.Tensor) -> list[torch.Tensor]:
    """In place; the results of each tanh."""
    kept = []
    for step in steps:
        if step is None:
            kept.append(logits.tanh_().clone())
        else:
            logits.mul_(step)
    return kept


def _undo(steps: Sequence[LogitStep], gradient: torch.Tensor, kept: list[torch.Tensor]) -> None:
    """The gradient to what _do() was given, in place."""
    for step in reversed(steps):
        if step is None:
            squares = kept.pop().square_()
            gradient.mul_(squares.neg_().add_(1.0))
        else:
            gradient.mul_(step)


def _refusal(message: str, which: str, expected: str, got: str, hint: str = "") -> _C.Error:
    return _C.make_error(
        "USAGE", message, where="parallel.tiled_loss", which=which, expected=expected, got=got, hint=hint
    )


def _require(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    vocabulary: int,
) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or weight.size(1) != hidden.size(-1):
        raise _refusal(
            "hidden states do not fit the head",
            "head_weight",
            f"[V, {hidden.size(-1) if hidden.dim() else 'h'}]",
            str(list(weight.shape)),
            "at stage 3, gather it: engine.gathered(model.lm_head)" if weight.numel() == 0 else "",
        )
    if bias is not None and list(bias.shape) != [weight.size(0)]:
        raise _refusal("the bias does not fit the head", "bias", f"[{weight.size(0)}]", str(list(bias.shape)))
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise _refusal("hidden states and head have other dtypes", "head_weight", str(hidden.dtype), str(weight.dtype))
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise _refusal(
            "labels are not one a position",
            "labels",
            f"torch.int64 {list(hidden.shape[:-1])}",
            f"{labels.dtype} {list(labels.shape)}",
        )
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if outside.any():
        raise _refusal(
            "a label is outside of the vocabulary",
            "labels",
            f"0 to {vocabulary - 1}, or {ignore_index}",
            str(int(labels[outside][0])),
        )
