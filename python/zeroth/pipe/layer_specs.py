"""Layers that are described first and built by the ranks that run them, in the shape that DeepSpeed users know."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroth import _deferred
from zeroth.parallel._refuse import refuse
from zeroth.pipe.meta import meta_copy

__all__ = ["LayerSpec", "TiedLayerSpec", "own_spec", "seeded"]

_WHERE = "pipe.build"


class LayerSpec:
    """A layer that typename(*args, **kwargs) makes."""

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        if not callable(typename):
            refuse(
                "a layer is described by what makes it",
                where="pipe.LayerSpec",
                which="typename",
                expected="a class derived from nn.Module, or a function that returns a module",
                got=type(typename).__name__,
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    @property
    def name(self) -> str:
        """Of the class, for "type:" in partition()."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"

    def build(self, seed: int, *, like: nn.Module | None = None, deferred: bool = False) -> nn.Module:
        """The module, with the values that `seed` gives. The states of all generators are as before. `like`: has the
        same parameters and buffers, of the dtypes that are wanted. `deferred`: as zeroth.deferred() builds it, for an
        engine to fill."""

        def make() -> nn.Module:
            made = self._made()
            if like is not None:
                _conform(made, like)
            return made

        with seeded(seed):
            return _deferred.deferred(make) if deferred else make()

    def shape(self, seed: int) -> nn.Module:
        """The module on the meta device, without values."""
        made = None
        with contextlib.suppress(Exception), seeded(seed), torch.device("meta"), _NothingDrawn():
            made = self._made()
        if made is None:  # it needs values, so it is built and thrown away
            made = self.build(seed)
        tensors = [*made.parameters(), *made.buffers()]
        return made if all(one.is_meta for one in tensors) else meta_copy(made)

    def _made(self) -> nn.Module:
        made = self.typename(*self.module_args, **self.module_kwargs)
        if not isinstance(made, nn.Module):
            refuse(
                "what a specification makes is no module",
                where=_WHERE,
                which=repr(self),
                expected="a torch.nn.Module",
                got=type(made).__name__,
            )
        return made


_DRAWS = [
    getattr(torch.Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
] + [torch.Tensor.erfinv_, torch.Tensor.clamp_]  # the last two make a truncated normal distribution of a uniform one


class _NothingDrawn(TorchFunctionMode):
    """Tensors on the meta device have no values to draw. Torch would do it in Python, for which it imports its
    compiler: most of a second, and 60 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **(kwargs or {}))


class TiedLayerSpec(LayerSpec):
    """A layer whose module all specifications with the same `key` share; the first of them makes it. `forward_fn`:
    called with the module and its input in the place of the module. `tied_weight_attr`: names of the parameters that
    are meant; all parameters of the module are shared, as in one process."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def require_weights(self, module: nn.Module) -> None:
        """Raises Error MODEL if the module has no such parameters."""
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        missing = [name for name in self.tied_weight_attr if name not in names]
        if missing:
            refuse(
                "a tied layer has not the weights that it is to share",
                code="MODEL",
                where="pipe.TiedLayerSpec",
                which=f"{self.key}: {', '.join(missing)}",
                expected=f"tied_weight_attr from {', '.join(sorted(names)) or 'no parameters'}",
            )


def own_spec(layer: Any) -> Any:
    """A specification of DeepSpeed's own classes as one of these; anything else as it is."""
    if isinstance(layer, (LayerSpec, nn.Module)) or not hasattr(layer, "typename") or not hasattr(layer, "module_args"):
        return layer
    if not hasattr(layer, "key"):
        return LayerSpec(layer.typename, *layer.module_args, **layer.module_kwargs)
    return TiedLayerSpec(
        layer.key,
        layer.typename,
        *layer.module_args,
        forward_fn=layer.forward_fn,
        tied_weight_attr=layer.tied_weight_attr,
        **layer.module_kwargs,
    )


def _conform(made: nn.Module, like: nn.Module) -> None:
    """Dtypes, and what trains."""
    for own, other in zip(made.parameters(), like.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    own_tensors, other_tensors = [*made.parameters(), *made.buffers()], [*like.parameters(), *like.buffers()]
    for tensor, wanted in zip(own_tensors, other_tensors, strict=True):
        if tensor.dtype != wanted.dtype:
            tensor.data = tensor.data.to(wanted.dtype)
    made.train(like.training)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In here random numbers of torch, of Python, and of numpy if it is imported, follow from `seed`. Afterwards all
    generators go on as if nothing had been."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()
    torch.default_generator.manual_seed(seed % (1 << 63))
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
