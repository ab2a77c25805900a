"""What a model is for a pipeline: layers one after the other."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zeroth.parallel._refuse import refuse

__all__ = ["Chain", "Layer", "named_tensors", "refuse_unused", "require_range"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A part of a model that one rank runs whole. A frozen value."""

    name: str
    """ "embedding", "model.layers.3", "head"; of a list its number"""
    modules: tuple[nn.Module, ...]
    """those with parameters that it calls; empty for a function"""


class Chain(Protocol):
    """A model that can be run in layers. It is the user's, and called as before outside of run()."""

    loss_fn: Callable[..., Any] | None
    """called with the model's output and the labels of a micro-batch; None: the model's output is the result"""

    @property
    def model(self) -> nn.Module:
        """The model, whose parameter names are those of the job."""

    @property
    def layers(self) -> Sequence[Layer]:
        """In the order in which they run."""

    @property
    def uses(self) -> Mapping[str, tuple[int, ...]]:
        """For each name of a parameter or buffer the layers that use it, ascending; a tied weight has two, and its
        other names have the same. () for one that no layer uses."""

    @property
    def notes(self) -> Sequence[str]:
        """What users should know, for the log."""

    def reads_batch(self, first: int, last: int) -> bool:
        """Whether run() of these layers takes anything of the micro-batch."""

    def run(self, first: int, last: int, values: Any, batch: Any) -> Any:
        """Runs layers first..last-1 on one micro-batch. `values`: what layer first - 1 returned, None if first is 0: a
        tensor, or tuples, lists and dicts of tensors and plain values. Returns what layer `last` is to be given, or the
        result of the model if `last` is the number of layers. Autograd is the caller's: gradients of `values` flow if
        they require them. Touches no parameter that these layers do not use. One run at a time; raises Error USAGE,
        MODEL."""


def require_range(first: int, last: int, names: Sequence[str], values: Any) -> None:
    """Raises Error USAGE for a range of layers that is empty or not one of the chain, and for values that do not fit
    it."""
    if not 0 <= first < last <= len(names):
        refuse(
            "there are no such layers",
            where="pipe.run",
            which="first and last",
            expected=f"0 <= first < last <= {len(names)}",
            got=f"{first} and {last}",
        )
    if (values is None) != (first == 0):
        refuse(
            "only the first layer begins without values",
            where="pipe.run",
            which=names[first],
            expected="None" if first == 0 else f"what {names[first - 1]} returned",
            got=type(values).__name__,
        )


def refuse_unused(model: nn.Module, uses: Mapping[str, Sequence[int]]) -> None:
    """Raises Error MODEL, by name, for trainable parameters that no layer uses: no rank would have them."""
    unused = [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not uses[name]
    ]
    if unused:
        refuse(
            "no layer uses a trainable parameter",
            code="MODEL",
            where="pipe.chain_of",
            which=", ".join([*unused[:3], *(["..."] if len(unused) > 3 else [])]),
            expected="every trainable parameter in a layer, or read in a run with the sample",
            got=f"{len(unused)} that are not",
            hint="freeze it: parameter.requires_grad_(False); or give a sample= that uses it",
        )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, with all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
