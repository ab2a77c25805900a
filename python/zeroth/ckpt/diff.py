"""diff(): where two checkpoints differ, tensor by tensor."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from zeroth.ckpt.contents import NO_GROUP, Contents, Lazy, Param
from zeroth.ckpt.convert import read

__all__ = ["Difference", "diff"]

_PIECE = 1 << 22
"""elements that are compared at a time, in float64"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that is not equal."""

    what: str
    """"blocks.0.weight/exp_avg", "blocks.0.weight: lr", "step", "client_state" """
    kind: str
    """"missing in A", "missing in B", "shape", "dtype", "values" or "value" """
    a: Any = None
    b: Any = None
    elements: int = 0
    """that differ by more than the tolerance, or in their bits"""
    max_abs: float = 0.0
    max_rel: float = 0.0
    """of |a - b| / max(|a|, |b|)"""


def diff(
    a: str | os.PathLike[str] | Contents, b: str | os.PathLike[str] | Contents, *, tolerance: float | None = None
) -> list[Difference]:
    """What differs: parameters and states by name, hyper-parameters, updates, step, client state, buffers. Empty:
    nothing. World, plan and the ranges in the files do not count. Values are equal if all bits are; with `tolerance`,
    if |a - b| is at most that. Any forms that read() takes. One pair of tensors in memory at a time. Blocks. Raises
    Error CHECKPOINT, IO."""
    one = a if isinstance(a, Contents) else read(a)
    two = b if isinstance(b, Contents) else read(b)
    return [*_of_tensors(one, two, tolerance), *_of_the_rest(one, two)]


def _of_tensors(a: Contents, b: Contents, tolerance: float | None) -> Iterator[Difference]:
    here = {param.name: param for param in a.params}
    there = {param.name: param for param in b.params}
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in there or name not in here:
            yield Difference(what=name, kind="missing in B" if name in here else "missing in A")
            continue
        yield from _of_states(name, here[name].states, there[name].states, tolerance)
        yield from _of_facts(here[name], there[name])
        yield from _of_hypers(name, _hypers(a, here[name]), _hypers(b, there[name]))
    yield from _of_states("", a.buffers, b.buffers, tolerance)


def _of_states(name: str, a: dict[str, Lazy], b: dict[str, Lazy], tolerance: float | None) -> Iterator[Difference]:
    for state in [*a, *(state for state in b if state not in a)]:
        what = f"{name}/{state}" if name else state
        if state not in a or state not in b:
            yield Difference(what=what, kind="missing in B" if state in a else "missing in A")
            continue
        if a[state].shape != b[state].shape:
            yield Difference(what=what, kind="shape", a=list(a[state].shape), b=list(b[state].shape))
            continue
        if a[state].dtype != b[state].dtype:
            yield Difference(what=what, kind="dtype", a=str(a[state].dtype), b=str(b[state].dtype))
            continue
        found = compare(a[state].read(), b[state].read(), tolerance)
        if found is not None:
            elements, max_abs, max_rel = found
            yield Difference(what=what, kind="values", elements=elements, max_abs=max_abs, max_rel=max_rel)


def compare(a: torch.Tensor, b: torch.Tensor, tolerance: float | None) -> tuple[int, float, float] | None:
    """Elements that differ, the largest absolute and relative difference; None if none differs."""
    one, two = a.reshape(-1), b.reshape(-1)
    total, max_abs, max_rel = 0, 0.0, 0.0
    for begin in range(0, one.numel(), _PIECE):
        x, y = one[begin : begin + _PIECE].contiguous(), two[begin : begin + _PIECE].contiguous()
        width = x.dtype.itemsize
        other = (x.view(torch.uint8) != y.view(torch.uint8)).reshape(-1, width).any(dim=1)
        if not bool(other.any()):
            continue
        wide = torch.complex128 if x.dtype.is_complex else torch.float64
        x, y = x[other].to(wide), y[other].to(wide)
        gap = (x - y).abs().nan_to_num(nan=math.inf)  # of a NaN, whatever the other one is
        beyond = gap > tolerance if tolerance is not None else torch.ones_like(gap, dtype=torch.bool)
        if not bool(beyond.any()):
            continue
        total += int(beyond.sum())
        scale = torch.maximum(x.abs(), y.abs())
        rel = torch.where(gap == 0, 0.0, gap / scale).nan_to_num(nan=math.inf)
        max_abs, max_rel = max(max_abs, float(gap.max())), max(max_rel, float(rel.max()))
    return (total, max_abs, max_rel) if total else None


def _of_facts(a: Param, b: Param) -> Iterator[Difference]:
    for fact in ("updates", "trainable", "dtype"):
        x, y = getattr(a, fact), getattr(b, fact)
        if x != y:
            yield Difference(what=f"{a.name}: {fact}", kind="value", a=_plain(x), b=_plain(y))
    if sorted(a.aliases) != sorted(b.aliases):
        yield Difference(what=f"{a.name}: tied names", kind="value", a=sorted(a.aliases), b=sorted(b.aliases))


def _hypers(contents: Contents, param: Param) -> dict[str, Any]:
    return contents.groups[param.group] if NO_GROUP < param.group < len(contents.groups) else {}


def _of_hypers(name: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    for key in [*a, *(key for key in b if key not in a)]:
        if a.get(key) != b.get(key):
            yield Difference(what=f"{name}: {key}", kind="value", a=a.get(key), b=b.get(key))


def _of_the_rest(a: Contents, b: Contents) -> Iterator[Difference]:
    facts = (
        ("step", a.step, b.step),
        ("optimizer", a.optimizer, b.optimizer),
        ("accumulation", a.accumulation, b.accumulation),
        ("loss scaler", a.loss_scaler, b.loss_scaler),
    )
    for what, x, y in facts:
        if x != y:
            yield Difference(what=what, kind="value", a=x, b=y)
    for key in [*a.user, *(key for key in b.user if key not in a.user)]:
        if a.user.get(key) != b.user.get(key):
            what = "client_state" if key == "client" else key
            yield Difference(what=what, kind="value", a=a.user.get(key), b=b.user.get(key))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, torch.dtype) else value
