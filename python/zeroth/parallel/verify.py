"""Whether a model gives the same outputs after it has been split."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth._evaluation import evaluating
from zeroth.parallel._refuse import refuse

__all__ = ["difference", "outputs_of", "require_equal"]

_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}
"""largest difference, relative to the largest output; 16-bit types: 5 %"""


def difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest, relative to the largest that is expected."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def outputs_of(model: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The floating-point tensors that the model gives for `inputs`, without dropout and gradients."""
    if any(parameter.is_meta for parameter in model.parameters()):
        refuse(
            "a model without values cannot be verified",
            where="parallel.parallelize",
            which="verify",
            expected="a model with values",
            got="one that zeroth.deferred() has built",
        )
    with evaluating(model):
        made = model(**inputs)
    leaves = [made.logits] if hasattr(made, "logits") else torch.utils._pytree.tree_leaves(made)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def require_equal(model: nn.Module, expected: list[torch.Tensor], got: list[torch.Tensor], mesh: _C.Mesh) -> None:
    """Raises Error MODEL on all ranks if one of them has other outputs."""
    worst = 0.0
    for one, other in zip(expected, got, strict=False):
        worst = max(worst, difference(one, other) if one.shape == other.shape else float("inf"))
    worst = float(mesh.world.all_reduce(torch.tensor([worst], dtype=torch.float64), "max"))
    bound = _BOUND.get(expected[0].dtype, 0.05) if expected else 0.0
    if not expected or not worst <= bound:
        refuse(
            "a model gives other outputs after it was split",
            code="MODEL",
            where="parallel.parallelize",
            which=type(model).__name__,
            expected=f"a relative difference of at most {bound}" if expected else "floating-point outputs",
            got=worst,
            hint='a layer computes over what ranks share; print the plan, and say corrections={"name": "whole"}',
        )
