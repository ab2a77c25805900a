"""Names of parameters, buffers and modules, without those of the wrappers that torch.compile() makes."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

__all__ = ["own_names", "plain", "plain_keys"]

_Value = TypeVar("_Value")

_COMPILED = "_orig_mod"
"""under which torch.compile(module) keeps the module"""


def plain(name: str) -> str:
    """The name as it is without torch.compile(): "0.weight" of "0._orig_mod.weight". Engines, checkpoints and exports
    have these, so that what a compiled model has written goes into one that is not compiled, and the other way."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED) or name


def plain_keys(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """The mapping with plain names."""
    return {plain(name): value for name, value in values.items()}


def own_names(model: nn.Module) -> dict[str, str]:
    """The model's own names of modules, parameters and buffers, by their plain names. Of a module and its wrapper the
    wrapper's."""
    names: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(plain(path), path)
        for key in (*module._parameters, *module._buffers):
            name = f"{path}.{key}" if path else key
            names.setdefault(plain(name), name)
    return names
