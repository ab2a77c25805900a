"""Runs a chain in parts in one process, as stages of a pipeline would, and compares gradients with those of the
whole."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroth.pipe import Chain


@contextlib.contextmanager
def alone(chain: Chain, first: int, last: int) -> Iterator[None]:
    """In here only parameters that these layers use have values, as on a rank that has no others."""
    kept: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
    for name, parameter in chain.model.named_parameters(remove_duplicate=False):
        foreign = not any(first <= layer < last for layer in chain.uses[name])
        if foreign and id(parameter) not in kept and parameter.dim() > 0:
            kept[id(parameter)] = parameter, parameter.data
            parameter.data = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype)
    yield
    for parameter, data in kept.values():
        parameter.data = data


def received(value: Any) -> Any:
    """As it comes from another rank: without history, and its gradient is wanted."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point() and value.requires_grad)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def loss_of(result: Any) -> torch.Tensor:
    return result.loss if hasattr(result, "loss") else result


def run_parts(chain: Chain, boundaries: Sequence[int], batches: Sequence[Any]) -> list[torch.Tensor]:
    """Forwards of all micro-batches in all parts, then their backwards, the last part first; returns the losses.
    Gradients are in the parameters."""
    parts = list(itertools.pairwise(boundaries))
    inputs: list[list[Any]] = []
    outputs: list[list[Any]] = []
    for batch in batches:
        values, given, made = None, [], []
        for first, last in parts:
            given.append(tree_map(received, values))
            with alone(chain, first, last):
                values = chain.run(first, last, given[-1], batch)
            made.append(values)
        inputs.append(given)
        outputs.append(made)
    for given, made in zip(inputs, outputs, strict=True):
        loss_of(made[-1]).backward()
        for part in range(len(parts) - 2, -1, -1):
            sent, wanted = tensors(made[part]), tensors(given[part + 1])
            assert len(sent) == len(wanted), (len(sent), len(wanted))
            pairs = [(one, other.grad) for one, other in zip(sent, wanted, strict=True) if other.grad is not None]
            if pairs:
                torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
    return [loss_of(made[-1]).detach() for made in outputs]


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def splits(count: int) -> list[list[int]]:
    """Boundaries of 1 to 4 parts of `count` layers: the first and the last layer alone, and in the middle."""
    inside = {(), (1,), (count - 1,), (count // 2,), (1, count - 1), (1, count // 2, count - 1)}
    return [[0, *cuts, count] for cuts in sorted(inside, key=len) if list(cuts) == sorted(set(cuts)) and 0 not in cuts]


def require_equal(chain: Chain, plain: Callable[[Any], Any], batches: Sequence[Any], *, bound: float = 1e-12) -> None:
    """Losses and gradients of `chain` in 1 to 4 parts are those of plain(batch), a call of the whole model: to the bit,
    but for weights that several layers use, whose sum over uses and micro-batches has another order: these to `bound`,
    relative to the largest."""
    model = chain.model
    model.zero_grad()
    expected = [loss_of(plain(batch)) for batch in batches]
    for loss in expected:
        loss.backward()
    wanted = {name: None if grad is None else grad.clone() for name, grad in gradients(model).items()}
    assert any(grad is not None and grad.abs().max() > 0 for grad in wanted.values())
    for boundaries in splits(len(chain.layers)):
        model.zero_grad()
        losses = run_parts(chain, boundaries, batches)
        for loss, other in zip(losses, expected, strict=True):
            assert torch.equal(loss, other.detach()), (boundaries, loss, other)
        for name, grad in gradients(model).items():
            other = wanted[name]
            assert (grad is None) == (other is None), (boundaries, name)
            if grad is None or other is None:
                continue
            difference = float((grad - other).abs().max()) if grad.numel() else 0.0
            largest = float(other.abs().max()) if grad.numel() else 0.0
            allowed = 0.0 if len(chain.uses[name]) < 2 else bound * largest
            assert difference <= allowed, (boundaries, name, difference, largest)
    model.zero_grad()
