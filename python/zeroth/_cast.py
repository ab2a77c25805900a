"""Inputs of a forward in the dtype that the model computes in: fp16.auto_cast and bf16.auto_cast."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["inputs"]


def inputs(dtype: str, values: Any) -> Any:
    """`values` with all floating-point tensors cast to `dtype`, "float16" or "bfloat16"."""
    wanted: torch.dtype = getattr(torch, dtype)

    def cast(value: Any) -> Any:
        return value.to(wanted) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
