"""What a look at a model says about its blocks: their order, what passes between them, and which layer uses what."""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from zeroth._tiled import Tile
from zeroth._units import find_units
from zeroth.pipe.forms import Entry, Form

__all__ = ["BlockPlan", "Places", "around", "block_paths"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Layer 0 is what runs before the first block, layers 1..n are the blocks with what runs before each of them, layer
    n + 1 is what runs after the last one. A frozen value; modules and parameters by their names."""

    blocks: tuple[str, ...]
    """in the order of their calls"""
    entry: Entry
    """of block 1"""
    forms: tuple[Form, ...]
    """of the outputs of the blocks"""
    outside: Mapping[str, tuple[int, ...]]
    """modules with parameters that no block has, and the layers that call them"""
    loose: Mapping[str, torch.Size]
    """parameters that are read outside of any of these modules, and their shapes"""
    written: frozenset[str]
    """modules of `outside` whose output is changed in place"""
    uses: Mapping[str, tuple[int, ...]]
    """of all parameters and buffers, with all their names"""


class Places:
    """Modules by their paths, also after other ones were put there."""

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self._at: dict[str, tuple[nn.Module, str]] = {}
        for path in paths:
            parent, _, name = path.rpartition(".")
            self._at[path] = model.get_submodule(parent), name

    def __getitem__(self, path: str) -> nn.Module:
        parent, name = self._at[path]
        module = parent._modules[name]
        assert module is not None
        return module


def block_paths(model: nn.Module) -> list[str]:
    """Blocks: the units of the model but for tiles of layers, with what else is in their ModuleLists, and in no other
    unit."""
    found = [path for path, module in find_units(model).items() if not isinstance(module, Tile)]
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in found):
        container = model.get_submodule(parent)
        if isinstance(container, nn.ModuleList):
            found += [f"{parent}.{name}" if parent else name for name, _ in container.named_children()]
    unique = dict.fromkeys(found)
    inside = [path for path in unique if any(path.startswith(f"{other}.") for other in unique)]
    return [path for path in unique if path not in inside]


def around(paths: Iterable[str]) -> set[str]:
    """The modules that lie around these ones; "" is the model."""
    found = {""}
    for path in paths:
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found
