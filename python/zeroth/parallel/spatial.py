"""Convolutions, poolings and batch norms over images that are split along their height: domain parallelism.

Shapes: x [B, C, own H, W]: every rank of `group` has all channels and columns of some rows, in rank order; parts may be
uneven and empty. Results are split as evenly as can be. Weights are the same on all ranks; a rank's gradient is its
part, the sum over the group is the whole one: along this axis ZeRO sums, as it does along a split sequence.
"""

import zlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from zeroth import _C
from zeroth.parallel._bytes import bytes_of
from zeroth.parallel.halo import fetch_rows, heights_of
from zeroth.parallel.image_window import Window

__all__ = [
    "is_alike",
    "spatial_batch_norm",
    "spatial_conv2d",
    "spatial_mean",
    "spatial_pool2d",
    "split_rows",
    "whole_rows",
]

Pair = int | tuple[int, int]


def split_rows(x: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
    """This rank's rows of whole images [B, C, H, W], as even as can be, the first ranks with one more."""
    return _C.split_to_group(x, 2, group)


def whole_rows(x: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
    """All rows, on every rank. What is computed from them is the same on all: end with part_of_loss()."""
    return _C.all_gather(x, 2, group, heights_of(x, 2, group))


def is_alike(x: torch.Tensor, group: _C.Communicator) -> bool:
    """Whether x [B, C, 1, 1] is what all ranks have whole and alike, as behind a mean, and no image of as many rows as
    ranks. The same on all of them. Collective for x of one column: 16 bytes a rank."""
    if group.size == 1:
        return True
    if x.dim() != 4 or x.size(3) != 1:
        return False
    every = group.all_gather(torch.tensor([[x.size(2), zlib.crc32(bytes_of(x))]])).tolist()
    return all(one == [1, every[0][1]] for one in every)


def spatial_mean(x: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
    """The mean over rows and columns of the whole images, [B, C, 1, 1], on every rank: AdaptiveAvgPool2d(1). What is
    computed from it is the same on all: end with part_of_loss()."""
    rows = sum(heights_of(x, 2, group))
    return _C.all_reduce(x.sum((2, 3), keepdim=True), group) / (rows * x.size(3))


def spatial_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: _C.Communicator,
    *,
    stride: Pair = 1,
    padding: Pair | Literal["same", "valid"] = 0,
    dilation: Pair = 1,
    groups: int = 1,
    heights: Sequence[int] | None = None,
) -> torch.Tensor:
    """F.conv2d of the whole images; the rows of the result that are this rank's. `weight`: [C', C / groups, kh, kw].

    `heights`: rows of each rank, if they are known; else the ranks ask, 8 bytes each. Receives, forward, the rows that
    Window.cut() says, and in backward as many as it gave. Collective and blocking, forward and backward. Raises Error
    USAGE for a window larger than the image, and what F.conv2d raises."""
    (sh, sw), (dh, dw) = _pair(stride), _pair(dilation)
    kh, kw = weight.shape[2:]
    before, after, left, right = _padding(padding, (kh, kw), (sh, sw), (dh, dw))
    window = Window(size=kh, stride=sh, before=before, after=after, dilation=dh)
    rows = _window_rows(x, window, group, heights, 0.0)
    if left != right:
        rows, left = functional.pad(rows, (left, right)), 0
    if rows.size(2) == 0:
        columns = (rows.size(3) + 2 * left - dw * (kw - 1) - 1) // sw + 1
        return _empty(rows, weight.size(0), columns, weight, bias)
    return functional.conv2d(rows, weight, bias, (sh, sw), (0, left), (dh, dw), groups)


def spatial_pool2d(
    x: torch.Tensor,
    kind: Literal["max", "avg"],
    kernel_size: Pair,
    group: _C.Communicator,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    count_include_pad: bool = True,
    heights: Sequence[int] | None = None,
) -> torch.Tensor:
    """F.max_pool2d or F.avg_pool2d of the whole images (without ceil_mode); the rows of the result that are this
    rank's. `dilation`: of "max" only; `count_include_pad`: of "avg" only. Calls and errors as spatial_conv2d()."""
    (kh, kw), (ph, pw), (dh, dw) = _pair(kernel_size), _pair(padding), _pair(dilation)
    sh, sw = (kh, kw) if stride is None else _pair(stride)
    window = Window(size=kh, stride=sh, before=ph, after=ph, dilation=dh)
    if kind == "max":
        rows = _window_rows(x, window, group, heights, -torch.inf)
        if rows.size(2) > 0:
            return functional.max_pool2d(rows, (kh, kw), (sh, sw), (0, pw), (dh, dw))
    elif count_include_pad:
        rows = _window_rows(x, window, group, heights, 0.0)
        if rows.size(2) > 0:
            return functional.avg_pool2d(rows, (kh, kw), (sh, sw), (0, pw))
    else:
        known = heights_of(x, 2, group) if heights is None else heights
        rows = _window_rows(x, window, group, known, 0.0)
        cut = window.cut(known)
        if rows.size(2) > 0:
            inside = rows.new_ones(1, 1, rows.size(2) - sum(cut.padding[group.rank]), rows.size(3))
            inside = functional.pad(inside, (0, 0, *cut.padding[group.rank]))
            sums = functional.avg_pool2d(rows, (kh, kw), (sh, sw), (0, pw), divisor_override=1)
            return sums / functional.avg_pool2d(inside, (kh, kw), (sh, sw), (0, pw), divisor_override=1)
    return _empty(rows, x.size(1), (x.size(3) + 2 * pw - dw * (kw - 1) - 1) // sw + 1)


def spatial_batch_norm(x: torch.Tensor, norm: nn.BatchNorm2d, group: _C.Communicator) -> torch.Tensor:
    """`norm` of the whole images: in training its statistics are those of all ranks of the group, by one all_reduce of
    C + 1 values and one of C; running statistics are updated alike on all of them. Statistics are summed in x's dtype,
    16-bit ones in float32. Without running statistics, and in training, collective; else local."""
    training = norm.training or norm.running_mean is None
    if not training:
        return functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count = wide.new_tensor([wide.numel() / wide.size(1)])
    totals = _C.all_reduce(torch.cat([wide.sum((0, 2, 3)), count]), group)
    number = totals[-1].detach()
    mean = (totals[:-1] / number)[:, None, None]
    centred = wide - mean
    variance = _C.all_reduce(centred.square().sum((0, 2, 3)), group) / number
    if norm.training and norm.running_mean is not None and norm.running_var is not None:
        _update(norm, mean.detach()[:, 0, 0], variance.detach() * number / (number - 1))
    result = centred * torch.rsqrt(variance + norm.eps)[:, None, None]
    if norm.weight is not None:
        result = result * norm.weight[:, None, None] + norm.bias[:, None, None]
    return result.to(x.dtype)


@torch.no_grad()
def _update(norm: nn.BatchNorm2d, mean: torch.Tensor, variance: torch.Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), share)


def _window_rows(
    x: torch.Tensor, window: Window, group: _C.Communicator, heights: Sequence[int] | None, fill: float
) -> torch.Tensor:
    """The rows under this rank's windows, with the padding at the image's ends."""
    known = heights_of(x, 2, group) if heights is None else heights
    cut = window.cut(known)
    rows = fetch_rows(x, 2, known, cut.wanted, group)
    padding = cut.padding[group.rank]
    return functional.pad(rows, (0, 0, *padding), value=fill) if any(padding) else rows


def _empty(rows: torch.Tensor, channels: int, columns: int, *weights: torch.Tensor | None) -> torch.Tensor:
    """No rows, in the graph of all that others compute theirs from."""
    parts = [one.reshape(-1)[:0].to(rows.dtype) for one in (rows, *weights) if one is not None]
    return torch.cat(parts).view(rows.size(0), channels, 0, columns)


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _padding(
    padding: Pair | str, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Rows before and after, columns before and after."""
    if not isinstance(padding, str):
        rows, columns = _pair(padding)
        return rows, rows, columns, columns
    if padding == "valid":
        return 0, 0, 0, 0
    if padding != "same" or stride != (1, 1):
        raise _C.make_error(
            "USAGE",
            "there is no such padding",
            where="parallel.spatial_conv2d",
            expected='numbers, "valid", or "same" with stride 1',
            got=f"{padding!r} with stride {stride}",
        )
    total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2
