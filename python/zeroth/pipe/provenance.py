"""Which layer made what: every operator of a run on the meta device says what it reads and writes.

[Note: What may pass] Ranks run the code before their layers again, on the same batch, but have no parameters for it. So
a layer may read three things: what it computed itself, what the layer before it returned, and what follows from the
batch and from buffers alone. Every storage has the layer that wrote it last, if its values depend on a parameter. A
read of one that another layer wrote, and that was not passed on, would be a read of values that a rank does not have.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zeroth.pipe.chain import named_tensors
from zeroth.pipe.forms import leaves_of
from zeroth.pipe.meta import ZerosForValues

__all__ = ["Provenance", "key_of", "keys_of"]

_SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
               "new_empty_strided", "new_zeros", "new_ones", "new_full"}  # fmt: skip
"""operators that read no values"""


def key_of(tensor: torch.Tensor) -> int:
    """Of its storage, which views share."""
    return int(tensor.untyped_storage()._cdata)


def keys_of(tree: Any) -> set[int]:
    """Of all tensors in tuples, lists and dicts."""
    return {key_of(leaf) for leaf in leaves_of(tree)}


class Provenance(ZerosForValues):  # type: ignore[no-untyped-call]
    """While it is active, the layer in `layer` runs."""

    def __init__(self, model: nn.Module, on_foreign_read: Callable[[int, int, str], None]) -> None:
        """`on_foreign_read`: called with storage, layer that wrote it and operator for a read that is not possible in a
        pipeline."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = 0
        self.in_module = False
        """whether the present operator is inside a module that was registered as one"""
        self.uses: defaultdict[int, set[int]] = defaultdict(set)
        """layers that read a parameter or buffer, by its storage"""
        self.loose: set[int] = set()
        """parameters that were read outside of modules"""
        self.passed: set[int] = set()
        """storages of earlier layers that this one may read"""
        self.read: defaultdict[int, set[int]] = defaultdict(set)
        """storages by the layer that read them"""
        self.changed: set[int] = set()
        """storages that were written after they were made"""
        self._own = {key_of(tensor) for _, tensor in named_tensors(model)}
        self._parameters = {key_of(parameter) for parameter in model.parameters()}
        self._maker: dict[int, int] = {}
        self._on_foreign_read = on_foreign_read
        self._kept: list[torch.Tensor] = []
        """all tensors, so that their storages stay different ones"""

    def maker(self, key: int) -> int | None:
        """The layer that wrote a storage last; None if its values depend on no parameter."""
        return self._maker.get(key)

    def keep(self, tree: Any) -> None:
        """Tensors that came from elsewhere."""
        self._kept += leaves_of(tree)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = dict.fromkeys(key_of(one) for one in leaves_of((args, kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        written = set(_written(func, args, kwargs))
        name = str(func._schema.name).partition("::")[2]
        depends = [self._note_read(key, name) for key in before] if name not in _SHAPE_ONLY else []
        self.keep((args, kwargs, result))
        self.changed |= written
        if any(depends):
            for key in (keys_of(result) - before.keys()) | written:
                if key not in self._own:
                    self._maker[key] = self.layer
        return result

    def _note_read(self, key: int, operator: str) -> bool:
        """Whether its values depend on a parameter."""
        self.read[self.layer].add(key)
        if key in self._own:
            self.uses[key].add(self.layer)
            if not self.in_module and key in self._parameters:
                self.loose.add(key)
            return key in self._parameters
        maker = self._maker.get(key)
        if maker is not None and maker != self.layer and key not in self.passed:
            self._on_foreign_read(key, maker, operator)
        return maker is not None


def _written(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[int]:
    """Storages that the operator writes."""
    if not func._schema.is_mutable:
        return
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from keys_of(given.get(argument.name))
