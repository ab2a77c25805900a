"""Errors of this package."""

from typing import NoReturn

import torch

from zeroth import _C

__all__ = ["refuse", "require_attention", "who"]


def who(group: _C.Communicator) -> str:
    """ "rank 1/4 of world/mesh0/sp", as other errors name a rank of a group"""
    return f"rank {group.rank}/{group.size} of {group.name}"


def refuse(
    message: str,
    *,
    where: str,
    code: str = "USAGE",
    who: str = "",
    which: str = "",
    expected: object = "",
    got: object = "",
    hint: str = "",
) -> NoReturn:
    """Raises Error `code`."""
    raise _C.make_error(
        code, message, where=where, who=who, which=which, expected=str(expected), got=str(got), hint=hint
    )


def require_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, where: str, who: str) -> None:
    """Raises Error USAGE if q [B, H, q, D], k [B, K, k, D] and v [B, K, k, E] are no attention: H % K == 0, one
    dtype."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not fits or q.shape[3] != k.shape[3]:
        refuse(
            "shapes of an attention do not fit each other",
            where=where,
            who=who,
            which="q, k and v",
            expected="[B, H, n, D], [B, K, n, D] and [B, K, n, E]",
            got=shapes,
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        refuse(
            "query heads do not divide into groups, one for each key and value head",
            where=where,
            who=who,
            which="heads",
            expected="a multiple of the key and value heads",
            got=shapes,
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        refuse(
            "an attention has several dtypes",
            where=where,
            who=who,
            which="q, k and v",
            expected="one floating-point dtype",
            got=f"{q.dtype}, {k.dtype}, {v.dtype}",
        )
