"""A list of layers as a chain."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
        pipeline = model if isinstance(model, PipelineModule) else None
        self.loss_fn = loss_fn or (pipeline.loss_fn if pipeline is not None else None)
        self.notes: tuple[str, ...] = ()
        self._interval = 0 if pipeline is None else pipeline.activation_checkpoint_interval
        self._checkpointable = None if pipeline is None else pipeline.checkpointable_layers
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
        path = self._list.path_of(number)
        if path is not None:
            return (self._list.get_submodule(path),)
        return tuple(one for one in tensors_in(self._list.specs[number]) if isinstance(one, nn.Module))

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

    def run(self, first: int, last: int, values: Any, batch: Any) -> Any:
        require_range(first, last, self._names, values)
        inputs, labels = parts_of(batch)
        value, held = (inputs, {}) if first == 0 else stashed.unpacked(values)
        step = self._interval or last - first
        for begin in range(first, last, step):
            part = functools.partial(self._run, begin, min(begin + step, last))
            if self._interval and self._is_recomputed(begin, min(begin + step, last)):
                value, held = checkpoint(part, value, held, use_reentrant=False)
            else:
                value, held = part(value, held)
        rest = stashed.Stash(held)
        if last < len(self._names):
            return stashed.packed(value, rest)
        rest.require_empty()
        return value if self.loss_fn is None else self.loss_fn(value, labels)

    def _run(self, first: int, last: int, value: Any, held: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        with stashed.stashing(held) as stash:
            for number in range(first, last):
                value = self._call(number, value)
        return value, stash.values

    def _call(self, number: int, value: Any) -> Any:
        if self._list is not None:
            function: Any = self._list.function_of(number)
        else:
            function = self.model._modules[self._names[number]]
        return call_layer(function, value)

    def _is_recomputed(self, first: int, last: int) -> bool:
        if self._checkpointable is not None:
            return all(self._kind(number) in self._checkpointable for number in range(first, last))
        return any(self._modules(number) for number in range(first, last))

    def _kind(self, number: int) -> str:
        modules = self._modules(number)
        return type(modules[0]).__name__ if modules else ""
