"""A list of layers as a chain."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.pipe import stashed
from zeroth.pipe.batches import parts_of
from zeroth.pipe.chain import Layer, named_tensors, refuse_unused, require_range
from zeroth.pipe.layer_list import LayerList, PipelineModule, call_layer, tensors_in

__all__ = ["ListChain"]


class ListChain:
    """A Chain of a LayerList, nn.Sequential or nn.ModuleList.

    A micro-batch is (inputs, labels); one that is no pair is both. Layer 0 gets the inputs, each other layer what the
    one before returned, as call_layer() does it. At the end loss_fn(output, labels) is the result, or the output if
    there is no loss_fn. Stashed values are carried along, and recomputed as the rest."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.model = model
        self.loss_fn = loss_fn or (model.loss_fn if isinstance(model, PipelineModule) else None)
        self.notes: tuple[str, ...] = ()
        self._list = model if isinstance(model, LayerList) else None
        self._names = tuple(model._modules if self._list is None else map(str, range(len(self._list))))
        if not self._names:
            refuse("there is nothing to split", where="pipe.chain_of", which=type(model).__name__, got="no layers")
        for name, layer in model._modules.items():
            if self._list is None and getattr(type(layer), "forward", None) in (None, nn.Module.forward):
                refuse(
                    "a layer cannot be called",
                    code="MODEL",
                    where="pipe.chain_of",
                    which=name,
                    expected="modules with a forward",
                    got=type(layer).__name__,
                )
        self.uses = self._uses()
        refuse_unused(model, self.uses)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(Layer(name=name, modules=self._modules(number)) for number, name in enumerate(self._names))

    def _modules(self, number: int) -> tuple[nn.Module, ...]:
        if self._list is None:
            module = self.model._modules[self._names[number]]
            return () if module is None else (module,)
        return self._list.modules_of(number)

    def _uses(self) -> dict[str, tuple[int, ...]]:
        layers: defaultdict[int, set[int]] = defaultdict(set)
        named = dict(named_tensors(self.model))
        own = {id(tensor) for tensor in named.values()}
        for number, name in enumerate(self._names):
            for tensor in self._tensors(number):
                layers[id(tensor)].add(number)
                if id(tensor) not in own:
                    refuse(
                        "a function uses a module that is no layer of the list, so it would not be trained",
                        code="MODEL",
                        where="pipe.chain_of",
                        which=f"layer {name}",
                        expected="modules that are layers themselves",
                        hint="put the module into the list, or make the function the forward of a module",
                    )
        return {name: tuple(sorted(layers[id(tensor)])) for name, tensor in named.items()}

    def _tensors(self, number: int) -> Iterator[torch.Tensor]:
        function = self._list is not None and self._list.path_of(number) is None
        held = tensors_in(self._list.specs[number]) if self._list is not None and function else self._modules(number)
        for one in held:
            if isinstance(one, nn.Module):
                yield from one.parameters()
                yield from one.buffers()
            else:
                yield one

    def reads_batch(self, first: int, last: int) -> bool:
        return first == 0 or (last == len(self._names) and self.loss_fn is not None)

    def run(self, first: int, last: int, values: Any, batch: Any) -> Any:
        require_range(first, last, self._names, values)
        inputs, labels = parts_of(batch)
        value, held = (inputs, {}) if first == 0 else stashed.unpacked(values)
        if self._list is not None:
            value, held = self._list.run(first, last, value, held)
        else:
            with stashed.stashing(held) as stash:
                for name in self._names[first:last]:
                    value = call_layer(cast("nn.Module", self.model._modules[name]), value)
            held = stash.values
        rest = stashed.Stash(held)
        if last < len(self._names):
            return stashed.packed(value, rest)
        rest.require_empty()
        return value if self.loss_fn is None else self.loss_fn(value, labels)
