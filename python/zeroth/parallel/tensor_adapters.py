"""Adapters of low rank on layers that ranks share, as PEFT makes them: a module with the layer it sits on, base_layer,
and pairs of layers by name, lora_A [rank, in] and lora_B [out, rank].

An adapter takes the role of its layer (Hu et al. 2021; x whole, or cut as the layer takes it):

    column:  x whole -> A whole -> h whole -> B column -> own outputs
    row:     own inputs -> A row, the sum over the ranks -> h whole -> B whole -> outputs whole
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from zeroth.parallel.tensor_share import Share, is_linear

__all__ = ["Adapter", "adapters_of", "base_name", "linears_of", "plain_name", "problem_of", "shares_of_adapters"]

_BASE = "base_layer"
_LOW = ("lora_A", "lora_B")
_BESIDE = ("lora_dropout", *_LOW)


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """Names of modules."""

    holder: str
    pairs: tuple[tuple[str, str], ...]
    """lora_A and lora_B of each adapter"""
    dropouts: tuple[str, ...]
    problem: str
    """why ranks cannot share the layer with it; "" if they can"""

    @property
    def base(self) -> str:
        return f"{self.holder}.{_BASE}"


def plain_name(name: str) -> str:
    """Of a layer, as it was before adapters were put on it."""
    return name.removesuffix(f".{_BASE}")


def base_name(name: str, adapters: Mapping[str, Adapter]) -> str:
    """Of the layer inside, where the name is that of a module with adapters."""
    return f"{name}.{_BASE}" if f"{name}.{_BASE}" in adapters else name


def linears_of(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Linear layers by name, `path` before; without those of adapters."""
    found = {f"{path}.{name}" if name else path: one for name, one in module.named_modules() if is_linear(one)}
    return {name: one for name, one in found.items() if not {*_LOW} & {*name.split(".")}}


def problem_of(names: Iterable[str], adapters: Mapping[str, Adapter]) -> str:
    """Why ranks cannot share these layers; "" if their adapters are no reason."""
    return next((adapters[name].problem for name in names if name in adapters and adapters[name].problem), "")


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """By the name of the layer that they sit on."""
    found = [_of(name, module) for name, module in model.named_modules() if _BASE in module._modules and name]
    return {adapter.base: adapter for adapter in found}


def _of(name: str, holder: nn.Module) -> Adapter:
    modules = dict(holder.named_modules())
    low = [one for one in (getattr(holder, part, None) for part in _LOW) if isinstance(one, nn.ModuleDict)]
    keys = sorted({*low[0]} & {*low[1]}) if len(low) == len(_LOW) else []
    pairs = tuple((f"{name}.lora_A.{key}", f"{name}.lora_B.{key}") for key in keys)
    others = [
        one
        for one, _ in holder.named_parameters()
        if one.split(".")[0] not in (*_BESIDE, _BASE) or f"{_BASE}.{_BASE}." in one
    ]
    problem = ""
    if others:
        problem = f"{type(holder).__name__} has {others[0]} beside {_BASE}, lora_A and lora_B"
    elif not pairs:
        problem = f"the adapter of {type(holder).__name__} is not of pairs lora_A and lora_B"
    elif not all(is_linear(modules[f"{one}.{key}"]) for one in _LOW for key in keys):
        problem = f"lora_A and lora_B of {type(holder).__name__} are not linear layers"
    dropouts = tuple(f"{name}.{one}" for one in modules if one.startswith("lora_dropout."))
    return Adapter(name, pairs, dropouts, problem)


def shares_of_adapters(shares: Mapping[str, Share], adapters: Mapping[str, Adapter]) -> Iterator[Share]:
    """Of the adapters on layers that ranks share."""
    for name, adapter in adapters.items():
        share = shares.get(name)
        if share is None or share.role not in ("column", "row"):
            continue
        for low, high in adapter.pairs:
            shared, whole = (high, low) if share.role == "column" else (low, high)
            yield dataclasses.replace(share, name=shared, adapter=True)
            yield Share(whole, "whole", why=f"of an adapter on a {share.role} layer", adapter=True)
