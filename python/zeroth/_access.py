"""States of an engine by the names of the module's state_dict(): read, in parts or whole, and written."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from zeroth import _C, _boxes, _names

__all__ = ["Local", "Ranks", "Weights", "WeightReport", "full", "items", "load", "local", "names_of", "ranks_of"]

Ranks: TypeAlias = int | Sequence[int] | None
"""which ranks want values: one, several, or None for all"""

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""values by name"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """A rank's part of a state of one parameter."""

    tensor: torch.Tensor
    """[end - begin] on the CPU: a copy"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    begin: int
    """first element of the part, counted in the memory order of the parameter (row major, if it is contiguous)"""
    end: int
    """the element behind the last one"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What Engine.load_state_dict() found."""

    missing: list[str]
    """names of the module that were not given, whose values stay"""
    unexpected: list[str]
    """given names that the module does not have"""


def ranks_of(ranks: Ranks) -> list[int]:
    """As the engine takes them: an empty list is all ranks. Raises Error USAGE for an empty one here."""
    if ranks is None:
        return []
    chosen = [ranks] if isinstance(ranks, int) else list(ranks)
    if not chosen:
        raise _C.make_error(
            "USAGE",
            "no rank wants the values",
            where="python.state",
            which="ranks",
            expected="one rank, several, or None for all",
            got=repr(ranks),
        )
    return chosen


def wants(core: _C.Engine, ranks: Ranks) -> bool:
    """Whether this rank is among them."""
    return ranks is None or core.rank in ranks_of(ranks)


def names_of(model: nn.Module) -> list[str]:
    """Plain names of the tensors of state_dict(), in its order. Of boxes of one tensor that of it."""
    names: dict[str, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        passing: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names[_names.plain(_tensor_name(prefix + key, parameter))] = None
        for key, tensor in module._buffers.items():
            if tensor is not None and key not in passing:
                names[_names.plain(prefix + key)] = None
    return list(names)


def _tensor_name(name: str, parameter: nn.Parameter) -> str:
    box = _boxes.box_of(parameter)
    return name if box is None or not box.names or name in box.names else box.names[0]


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    names = set(names_of(model))
    found = _names.plain_keys(dict(model.named_buffers(remove_duplicate=False)))
    return {name: tensor for name, tensor in found.items() if name in names}


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def full(core: _C.Engine, model: nn.Module, name: str, kind: str, ranks: Ranks) -> torch.Tensor | None:
    """Engine.full()."""
    name = _names.plain(name)
    if kind == "param" and name not in core.aliases and (buffer := _buffers(model).get(name)) is not None:
        return _copy_of(buffer) if wants(core, ranks) else None
    found = core.read_states(kind, [name], ranks_of(ranks), False)
    return found[0][1] if found else None


def local(core: _C.Engine, kind: str) -> dict[str, Local]:
    """Engine.local()."""
    return {
        name: Local(tensor=tensor, shape=tuple(shape), begin=begin, end=end)
        for name, tensor, shape, begin, end in core.local_states(kind)
    }


def items(core: _C.Engine, model: nn.Module, kind: str, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Engine.state_dict_items()."""
    others: dict[str, list[str]] = {}
    for alias, name in core.aliases.items():
        if alias != name:
            others.setdefault(name, []).append(alias)
    readers = ranks_of(ranks)
    for batch in core.state_batches:
        for name, tensor in core.read_states(kind, batch, readers, True):
            yield name, tensor
            for alias in others.get(name, []):
                yield alias, tensor
    if kind in ("param", "master") and wants(core, ranks):
        for name, buffer in _buffers(model).items():
            yield name, _copy_of(buffer)


def load(core: _C.Engine, values: Weights | None, strict: bool) -> WeightReport:
    """Engine.load_state_dict()."""
    pairs: list[tuple[str, torch.Tensor]] = []
    if core.rank == 0:
        given = values.items() if isinstance(values, Mapping) else values or []
        # A wrong entry of rank 0 is for all ranks to hear, so it goes the way of the others.
        pairs = [
            (_names.plain(str(name)), tensor if isinstance(tensor, torch.Tensor) else _NO_TENSOR)
            for name, tensor in given
        ]
    missing, unexpected = core.load_state_dict(pairs, strict)
    return WeightReport(missing=missing, unexpected=unexpected)


_NO_TENSOR = torch.empty(0, device="meta")
