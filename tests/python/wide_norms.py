"""Norms of transformers' models in the model's own dtype."""

from __future__ import annotations

from typing import Any

import torch


def wide_norms(model: torch.nn.Module) -> None:
    """Norms of transformers round to float32; the same numbers, but not rounded."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") or hasattr(module, "variance_epsilon"):
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
            more = 1.0 if "Gemma" in kind else 0.0

            def forward(x: torch.Tensor, module: Any = module, eps: float = eps, more: float = more) -> torch.Tensor:
                return (module.weight + more) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

            module.forward = forward  # type: ignore[assignment]
