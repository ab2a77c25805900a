"""A list of layers as one module: layers, functions, and specifications of layers that are built later."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroth.parallel._refuse import refuse
from zeroth.pipe import stashed
from zeroth.pipe.layer_specs import LayerSpec, TiedLayerSpec, own_spec

__all__ = ["LayerList", "PipelineModule", "call_layer", "tensors_in"]

_WHERE = "pipe.LayerList"
_TIED = "tied_modules"


def call_layer(layer: Callable[..., Any], value: Any) -> Any:
    """With one argument, also if it is a tuple, as nn.Sequential and DeepSpeed do it; a module whose forward has
    several arguments without defaults gets the values of the tuple."""
    if isinstance(value, tuple) and isinstance(layer, nn.Module):
        kind: Any = type(layer)
        return layer(*value) if _required_arguments(kind) > 1 else layer(value)
    return layer(value)


@functools.cache
def _required_arguments(kind: Any) -> int:
    """Without a default, of the forward, besides the module."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)


def tensors_in(function: Any, seen: set[int] | None = None) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters that a function holds: as its object, in a closure, in a partial call."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, (nn.Module, nn.Parameter)):
        yield function
        return
    held = [
        getattr(function, "__self__", None),
        getattr(function, "func", None),
        getattr(function, "__wrapped__", None),
    ]
    if isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            held.append(cell.cell_contents)
    for one in held:
        if isinstance(one, nn.Parameter) or (callable(one) and not isinstance(one, type)):
            yield from tensors_in(one, seen)


class LayerList(nn.Module):
    """Layers in their order; each is called with what the one before returned. Parameters are named as in an
    nn.Sequential ("0.weight"), those of tied layers as in DeepSpeed ("tied_modules.embedding.weight").

    Layers are modules, functions, LayerSpec and TiedLayerSpec, or those of DeepSpeed. Specified ones are on the meta
    device until build(): each with random numbers of its own, from seed + number of the layer, so values do not depend
    on who builds what. `seed`: default torch.initial_seed(), what torch.manual_seed() was given last."""

    def __init__(self, layers: Iterable[Any], *, seed: int | None = None) -> None:
        super().__init__()
        self.seed = torch.initial_seed() if seed is None else seed
        self.specs: list[Any] = [own_spec(layer) for layer in layers]
        """what was given"""
        self._unbuilt: dict[str, tuple[LayerSpec, int]] = {}
        """specifications by the paths of their modules, and numbers of the layers"""
        self._replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """parameters that build() has replaced, by their ids, and the new ones"""
        if any(isinstance(layer, TiedLayerSpec) for layer in self.specs):
            self.add_module(_TIED, nn.ModuleDict())
        for number, layer in enumerate(self.specs):
            self._add(number, layer)

    def _add(self, number: int, layer: Any) -> None:
        if isinstance(layer, TiedLayerSpec):
            tied = self.get_submodule(_TIED)
            if layer.key not in tied._modules:
                path = f"{_TIED}.{layer.key}"
                self._unbuilt[path] = layer, number
                tied.add_module(layer.key, layer.shape(self.seed_of(number)))
            layer.require_weights(self.get_submodule(f"{_TIED}.{layer.key}"))
        elif isinstance(layer, LayerSpec):
            self._unbuilt[str(number)] = layer, number
            self.add_module(str(number), layer.shape(self.seed_of(number)))
        elif isinstance(layer, nn.Module):
            self.add_module(str(number), layer)
        elif not callable(layer):
            refuse(
                "a layer cannot be called",
                where=_WHERE,
                which=str(number),
                expected="a module, a function, a LayerSpec or a TiedLayerSpec",
                got=type(layer).__name__,
            )

    def __len__(self) -> int:
        return len(self.specs)

    def seed_of(self, number: int) -> int:
        """Of the random numbers with which a specified layer is built."""
        return self.seed + number

    def path_of(self, number: int) -> str | None:
        """Of the module that the layer calls; None for a function."""
        layer = self.specs[number]
        if isinstance(layer, TiedLayerSpec):
            return f"{_TIED}.{layer.key}"
        return str(number) if isinstance(layer, (LayerSpec, nn.Module)) else None

    def function_of(self, number: int) -> Callable[[Any], Any]:
        """What the layer calls."""
        layer, path = self.specs[number], self.path_of(number)
        if path is None:
            function: Callable[[Any], Any] = layer
            return function
        module = self.get_submodule(path)
        if path in self._unbuilt:
            refuse(
                "a layer runs that has not been built",
                where="pipe.run",
                which=f"layer {number}, {self._unbuilt[path][0]!r}",
                hint="zeroth.pipe.build(chain, first, last) before they run",
            )
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            tied = layer.forward_fn
            return lambda value: tied(module, value)
        return module

    def build(self, first: int, last: int, *, deferred: bool = False) -> None:
        """Makes the modules of layers first..last-1 that are not there yet, in the place of those without values; their
        dtypes, and whether they train, stay. Parameters are new objects. `deferred`: see LayerSpec.build()."""
        for path in dict.fromkeys(path for path in map(self.path_of, range(first, last)) if path in self._unbuilt):
            assert path is not None
            spec, number = self._unbuilt.pop(path)
            parent, _, name = path.rpartition(".")
            like = self.get_submodule(path)
            made = spec.build(self.seed_of(number), like=like, deferred=deferred)
            for old, new in zip(like.parameters(), made.parameters(), strict=True):
                self._replaced[id(old)] = old, new
            self.get_submodule(parent).add_module(name, made)

    def built(self, parameter: nn.Parameter) -> nn.Parameter:
        """What build() has put in the place of a parameter; else the parameter itself."""
        old, new = self._replaced.get(id(parameter), (None, parameter))
        return new if old is parameter else parameter

    def modules_of(self, number: int) -> tuple[nn.Module, ...]:
        """What the layer calls; of a function the modules that it holds."""
        path = self.path_of(number)
        if path is not None:
            return (self.get_submodule(path),)
        return tuple(one for one in tensors_in(self.specs[number]) if isinstance(one, nn.Module))

    def run(self, first: int, last: int, value: Any, held: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Layers first..last-1, with what is stashed before them, and after them."""
        with stashed.stashing(held) as stash:
            for number in range(first, last):
                value = call_layer(self.function_of(number), value)
        return value, stash.values

    def forward(self, inputs: Any) -> Any:
        """All layers, which have to be built."""
        value, held = self.run(0, len(self), inputs, {})
        stashed.Stash(held).require_empty()
        return value


class PipelineModule(LayerList):
    """A list of layers with what DeepSpeed's class of this name takes. zeroth.pipeline() reads the other arguments.

    `num_stages`, `partition_method`: see zeroth.pipe.partition(). `loss_fn`: called with output and labels.
    `activation_checkpoint_interval`: layers that are recomputed together in backward; 0: none.
    `checkpointable_layers`: names of classes; layers of others are not recomputed. `base_seed`: as `seed` of LayerList;
    layers always have random numbers of their own, so `seed_layers` changes nothing. Shapes may always change, so
    neither does `dynamic_shape`. Raises Error USAGE for `topology`, `seed_fn` and `activation_checkpoint_func`."""

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: object = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: object = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: object = None,
        checkpointable_layers: Iterable[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        for name, value, hint in (
            ("topology", topology, "the mesh of the configuration says which ranks do what"),
            ("seed_fn", seed_fn, "layers are seeded with base_seed + number"),
            ("activation_checkpoint_func", activation_checkpoint_func, "torch.utils.checkpoint without reentrance"),
        ):
            if value is not None:
                refuse(
                    "an argument of DeepSpeed's is not known here",
                    where="pipe.PipelineModule",
                    which=name,
                    expected="None",
                    got=type(value).__name__,
                    hint=hint,
                )
        super().__init__(layers, seed=base_seed)
        self.num_stages = num_stages
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = None if checkpointable_layers is None else tuple(checkpointable_layers)

    def run(self, first: int, last: int, value: Any, held: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Layers first..last-1; each `activation_checkpoint_interval` of them are recomputed in backward."""
        step = self.activation_checkpoint_interval or last - first
        for begin in range(first, last, step):
            end = min(begin + step, last)
            part = functools.partial(super().run, begin, end)
            if self.activation_checkpoint_interval and self._is_recomputed(begin, end):
                value, held = checkpoint(part, value, held, use_reentrant=False)
            else:
                value, held = part(value, held)
        return value, held

    def _is_recomputed(self, first: int, last: int) -> bool:
        modules = [self.modules_of(number) for number in range(first, last)]
        if self.checkpointable_layers is None:
            return any(modules)
        return all(bool(own) and type(own[0]).__name__ in self.checkpointable_layers for own in modules)
