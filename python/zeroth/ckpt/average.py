"""average(): one model of several that were trained apart. Ref: Li et al.: Branch-Train-Merge, arXiv 2208.03306."""

import math
import os
from collections.abc import Sequence
from typing import Literal

import torch

from zeroth.ckpt.contents import WEIGHT, Contents, Lazy, Param
from zeroth.ckpt.convert import read
from zeroth.ckpt.refusals import refused
from zeroth.ckpt.writer import write

__all__ = ["average", "averaged"]


def average(
    sources: Sequence[str | os.PathLike[str] | Contents],
    folder: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    optimizer: Literal["drop", "first"] = "drop",
    step: int | None = None,
) -> str:
    """Writes the weighted average of checkpoints as a checkpoint into `folder` and returns its path. Blocks.

    `weights`: one a source, at least 0; they are divided by their sum; None: equal ones. A weight of the result is
    sum(w_i * x_i) in float64, in the order of the sources, rounded once to the dtype of the state, nearest even; of
    masters, where there are some. Buffers of floating point are averaged, others are those of the first, and frozen
    parameters of integers must be equal. `optimizer`: "drop" (default): moments of runs at other points say nothing of
    the average; "first": those of the first source. Step (or `step`), hyper-parameters and client state are the
    first's. One tensor of the result in memory at a time, and one of a source. Raises Error USAGE, CHECKPOINT if
    parameters, shapes or dtypes differ, IO."""
    contents = [source if isinstance(source, Contents) else read(source) for source in sources]
    result = averaged(contents, weights)
    if optimizer == "drop":
        result.without_optimizer()
    if step is not None:
        result.step = step
    return write(result, folder)


def averaged(contents: Sequence[Contents], weights: Sequence[float] | None = None) -> Contents:
    """The same as contents, with the states of the optimizer of the first; they are read when they are wanted."""
    if not contents:
        raise refused("nothing to average", code="USAGE", which="sources")
    shares = [1.0] * len(contents) if weights is None else [float(weight) for weight in weights]
    total = math.fsum(shares)
    good = len(shares) == len(contents) and all(math.isfinite(share) and share >= 0 for share in shares) and total > 0
    if not good:
        raise refused(
            "weights of an average are not usable",
            code="USAGE",
            which="weights",
            expected=f"{len(contents)} numbers of at least 0, not all 0",
            got=str(shares),
        )
    shares = [share / total for share in shares]
    first = contents[0]
    others = [_fitting(first, other) for other in contents[1:]]
    for param in first.params:
        lazies = [param.states[WEIGHT], *(own[param.name].states[WEIGHT] for own in others)]
        param.states[WEIGHT] = _mean(lazies, shares, f"{first.origin}, {param.name}")
    for name, lazy in first.buffers.items():
        if not lazy.dtype.is_floating_point:
            continue
        found = [one.buffers.get(name) for one in contents]
        present = [one for one in found if one is not None]
        if len(present) != len(contents) or any(one.shape != lazy.shape or one.dtype != lazy.dtype for one in present):
            raise refused("buffers to average differ", which=f"{first.origin}, {name}")
        first.buffers[name] = _mean(present, shares, f"{first.origin}, {name}")
    return first


def _fitting(first: Contents, other: Contents) -> dict[str, Param]:
    """Parameters of the other by the names of the first. Raises Error CHECKPOINT."""
    own = {param.name: param for param in other.params}
    here = {param.name for param in first.params}
    wrong = sorted(here ^ own.keys())
    if wrong:
        raise refused(
            "checkpoints to average have other parameters",
            which=f"{first.origin} and {other.origin}",
            expected="the same names",
            got=", ".join(wrong[:10]) + (f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""),
        )
    for param in first.params:
        a, b = param.states[WEIGHT], own[param.name].states[WEIGHT]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise refused(
                "weights to average are of other shapes or dtypes",
                which=f"{first.origin} and {other.origin}, {param.name}",
                expected=f"{a.dtype} {list(a.shape)}",
                got=f"{b.dtype} {list(b.shape)}",
            )
    return own


def _mean(lazies: Sequence[Lazy], shares: Sequence[float], which: str) -> Lazy:
    dtype, shape = lazies[0].dtype, lazies[0].shape
    floating = dtype.is_floating_point and dtype.itemsize > 1

    def read_mean() -> torch.Tensor:
        first = lazies[0].read()
        if not floating:
            if any(not torch.equal(first.view(torch.uint8), one.read().view(torch.uint8)) for one in lazies[1:]):
                raise refused("tensors that cannot be averaged differ", which=which, got=str(dtype))
            return first
        total = first.to(torch.float64) * shares[0]
        for lazy, share in zip(lazies[1:], shares[1:], strict=True):
            total += lazy.read().to(torch.float64) * share
        return total.to(dtype)

    return Lazy(shape=shape, dtype=dtype, read=read_mean)
