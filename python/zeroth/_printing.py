"""Texts of tensors that have no memory now.

Torch's repr() reads values, and those of a parameter that is not gathered are elsewhere: printing a list of parameters
would be an error. So torch's function for the text of a tensor is asked by way of this one."""

from functools import wraps
from typing import Any

import torch

from zeroth import _C

__all__ = ["install"]


def install() -> None:
    """Makes repr() of a parameter that is not gathered, and of a gradient that is in the engine, a text. Once is
    enough; more often does no harm."""
    texts: Any = torch._tensor_str
    plain = texts._str
    if getattr(plain, "_of_zeroth", False):
        return

    @wraps(plain)
    def text(tensor: torch.Tensor, **options: Any) -> str:
        why = _C.why_without_memory(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else ""
        if not why:
            return str(plain(tensor, **options))
        fields = [f"<{why}>", f"size={tuple(tensor.shape)}", f"dtype={tensor.dtype}"]
        if tensor.device.type != "cpu":
            fields.append(f"device='{tensor.device}'")
        if tensor.requires_grad:
            fields.append("requires_grad=True")
        return f"tensor({', '.join(fields)})"

    text._of_zeroth = True  # type: ignore[attr-defined]
    texts._str = text
