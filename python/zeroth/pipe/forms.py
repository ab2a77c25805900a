"""How a block takes and returns what passes between blocks: which parts of its arguments and of its output."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from zeroth.parallel._refuse import refuse

__all__ = ["Entry", "Form", "joined", "leaves_of", "separate"]

_WHERE = "pipe.run"


def leaves_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists, dicts and registered classes."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def joined(parts: Sequence[Any]) -> Any:
    """What passes to the next layer: a tensor, or a tuple where it is not one."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def separate(values: Any, count: int, layer: str) -> tuple[Any, ...]:
    """The reverse of joined(). Raises Error USAGE for another number of parts."""
    parts = tuple(values) if isinstance(values, (tuple, list)) else (values,)
    if len(parts) != count:
        refuse(
            "a layer was given other values than the layer before it returns",
            where=_WHERE,
            which=layer,
            expected=f"{count} values",
            got=f"{len(parts)}, of type {type(values).__name__}",
        )
    return parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Form:
    """The output of a block. A frozen value."""

    spec: _pytree.TreeSpec
    wanted: tuple[int, ...]
    """leaves that the rest of the model needs; the others are None for it"""

    def pick(self, output: Any, block: str) -> Any:
        """What passes on. Raises Error MODEL if the block returns another form than in the look."""
        leaves, spec = _pytree.tree_flatten(output)
        if spec != self.spec:
            refuse(
                "a block returns another form of values than when the model was looked at",
                code="MODEL",
                where=_WHERE,
                which=block,
                expected=self.spec,
                got=spec,
            )
        return joined([leaves[one] for one in self.wanted])

    def build(self, parts: Sequence[Any]) -> Any:
        """An output with these parts."""
        leaves: list[Any] = [None] * self.spec.num_leaves
        for place, one in zip(self.wanted, parts, strict=True):
            leaves[place] = one
        return _pytree.tree_unflatten(leaves, self.spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The arguments with which the first block takes what the layers before it made. A frozen value."""

    wanted: tuple[int | str, ...]
    """positions and keywords"""

    def pick(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What passes on."""
        return joined([args[one] if isinstance(one, int) else kwargs[one] for one in self.wanted])

    def replace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with these parts."""
        positional, named = list(args), dict(kwargs)
        for place, one in zip(self.wanted, parts, strict=True):
            if isinstance(place, int):
                positional[place] = one
            else:
                named[place] = one
        return tuple(positional), named
