"""Where a model can work on slices of the sequence: found from the plan of its shared matrices, no ranks needed."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.parallel.tensor_plan import blocks_of, is_attention
from zeroth.parallel.tensor_share import TensorPlan, is_linear

__all__ = ["NormPlan", "Region", "find_norm_plan"]


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Layers that need the whole sequence, or are cheapest with it. A frozen value; names of modules."""

    row: str
    columns: tuple[str, ...]
    entry: str
    """the module whose first input is gathered"""
    whole_input: bool
    """it is gathered at its begin; else where a column takes it"""
    apart: bool
    """each token is computed by itself: no attention"""


@dataclasses.dataclass(frozen=True, slots=True)
class NormPlan:
    """A frozen value; names of the model's modules and parameters."""

    regions: tuple[Region, ...]
    first: str
    """the first block"""
    last: str
    """what follows the last block: the norm, or that block itself"""
    around: str
    """the module that calls the blocks"""
    parts: tuple[str, ...]
    """parameters that see slices"""


def find_norm_plan(model: nn.Module, plan: TensorPlan) -> NormPlan:
    """The places for a model and the plan of its matrices, both as they are before they are shared. Raises Error MODEL,
    by name, for what might look along the sequence."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        _refuse(type(model).__name__, "one list of blocks", "an encoder and a decoder")
    adapters = [share.name for share in plan.shares if share.adapter]
    if adapters:
        _refuse(adapters[0], "no adapters on the layers that ranks share", "an adapter of low rank")
    modules = dict(model.named_modules())
    blocks = blocks_of(model)
    around = {path.rsplit(".", 2)[0] if path.count(".") > 1 else "" for path in blocks}
    lists = {path.rpartition(".")[0] for path in blocks}
    if len(lists) != 1:
        _refuse(type(model).__name__, "one list of blocks", ", ".join(sorted(lists)) or "none")
    roles = {share.name: share.role for share in plan.shares}
    regions = tuple(_regions(modules, roles, blocks))
    inside = {name for region in regions for name in (region.row, *region.columns)}
    for path, block in blocks.items():
        _require_known(path, block, modules, regions, inside, roles)
    parts: list[str] = []
    for path, block in blocks.items():
        for name, module in block.named_modules(prefix=path):
            parts += [one for one in _whole(name, module, roles) if name not in inside]
            if roles.get(name) == "row" and getattr(module, "bias", None) is not None:
                parts.append(f"{name}.bias")
    outer = next(iter(around))
    last = _norm_after(model.get_submodule(outer), outer, next(iter(lists)))
    if last:
        parts += [f"{last}.{name}" for name, _ in modules[last].named_parameters()]
    return NormPlan(regions, next(iter(blocks)), last or list(blocks)[-1], outer, tuple(parts))


def _regions(
    modules: Mapping[str, nn.Module], roles: Mapping[str, str], blocks: Mapping[str, nn.Module]
) -> Iterator[Region]:
    """Each row-parallel layer with the nearest columns that no other has."""
    taken: set[str] = set()
    for row in (name for name, role in roles.items() if role == "row"):
        block = next((path for path in blocks if row.startswith(f"{path}.")), None)
        if block is None:
            _refuse(row, "layers in blocks", "a row-parallel layer outside of them")
        path, columns = row, list[str]()
        while not columns and len(path) > len(block):
            path = path.rpartition(".")[0]
            columns = [
                name
                for name, role in roles.items()
                if role == "column" and name.startswith(f"{path}.") and name not in taken
            ]
        if not columns:
            _refuse(row, "column-parallel layers in its block", "none")
        taken.update(columns)
        entry = _common(columns)
        others = [
            parameter
            for name, module in modules.items()
            if (name == entry or name.startswith(f"{entry}.")) and name not in {*columns, row}
            for parameter in _whole(name, module, roles)
        ]
        alone = entry != block and not others
        if others and is_attention(modules[entry]):
            _refuse(entry, "an attention all of whose layers are shared", f"{', '.join(others[:3])} left whole")
        names = row.split(".")
        inner = [".".join(names[:count]) for count in range(block.count(".") + 2, len(names))]
        yield Region(row, tuple(columns), entry, alone, not any(is_attention(modules[name]) for name in inner))


def _whole(path: str, module: nn.Module, roles: Mapping[str, str]) -> list[str]:
    """Names of a module's own parameters that ranks neither share nor sum."""
    named = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
    known = ("summed", "heads")
    return [] if roles.get(path) in known else [name for name in named if roles.get(name) not in known]


def _common(names: Sequence[str]) -> str:
    """The innermost module around them."""
    parents = [name.split(".")[:-1] for name in names]
    path = parents[0]
    for other in parents[1:]:
        path = [one for one, two in zip(path, other, strict=False) if one == two][: len(path)]
    return ".".join(path)


def _norm_after(outer: nn.Module, path: str, blocks: str) -> str:
    """The one norm that the module around the blocks has behind them; "" if there is none."""
    names = [name for name, _ in outer.named_children()]
    behind = names[names.index(blocks.rpartition(".")[2]) + 1 :]
    norms = [name for name in behind if _is_norm(outer.get_submodule(name))]
    return (f"{path}." if path else "") + norms[0] if len(norms) == 1 else ""


def _is_norm(module: nn.Module) -> bool:
    """Over the last dimension, as far as its name and its parameters tell."""
    own = list(module.parameters(recurse=False))
    known = isinstance(module, nn.LayerNorm | nn.RMSNorm) or re.search("(RMS|Layer)_?Norm", type(module).__name__)
    return bool(known) and all(parameter.dim() == 1 for parameter in own)


def _require_known(
    path: str,
    block: nn.Module,
    modules: Mapping[str, nn.Module],
    regions: Sequence[Region],
    inside: set[str],
    roles: Mapping[str, str],
) -> None:
    """What works on slices must look at each token by itself."""
    for name, module in block.named_modules(prefix=path):
        if is_attention(module) and not any(one.startswith(f"{name}.") for one in inside):
            linear = any(is_linear(one) for one in module.modules())
            if linear and not any(name.startswith(f"{one.entry}.") or name == one.entry for one in regions):
                _refuse(name, "attention that ranks share", "one that is whole")
        if name in inside or not _whole(name, module, roles):
            continue
        vectors = all(parameter.dim() == 1 for parameter in module.parameters(recurse=False))
        if not (_is_norm(module) or is_linear(module) or (name == path and vectors)):
            _refuse(name, "linear layers and norms between the layers that ranks share", type(module).__name__)


def _refuse(which: str, expected: str, got: str) -> NoReturn:
    refuse(
        "a model cannot work on slices of the sequence between its shared layers",
        code="MODEL",
        where="parallel.parallelize",
        which=which,
        expected=expected,
        got=got,
        hint='norms="whole"',
    )
