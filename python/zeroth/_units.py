"""Units: the modules that are gathered and reduced as one. By default the blocks of a model."""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from torch import nn

from zeroth import _C

__all__ = ["Unit", "find_units", "units"]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit as the engine will see it."""

    name: str
    """path of the module; "root" for all that lies in no other unit"""
    type: str
    """class of the module"""
    num_params: int
    """elements of its own parameters, tied ones once"""


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Members of the longest ModuleList or Sequential that has at least two of one class, by path; else nothing, and all is root."""
    longest: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = {f"{path}.{name}" if path else name: child for name, child in module.named_children() if _has_params(child)}
        counts = Counter(type(child) for child in children.values())
        if not counts:
            continue
        repeated, count = counts.most_common(1)[0]
        if count >= 2 and count > len(longest):
            longest = {name: child for name, child in children.items() if type(child) is repeated}
    return longest


def named_units(model: nn.Module, chosen: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Paths of modules that the user chose. Raises Error for one that is not inside the model."""
    wanted = {id(module): module for module in chosen}
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if id(module) in wanted and name}
    missing = [module for key, module in wanted.items() if all(module is not other for other in found.values())]
    if missing:
        raise _C.make_error("MODEL", f"a unit is not a module inside the model: {type(missing[0]).__name__}")
    return found


def units(model: nn.Module) -> list[Unit]:
    """The units that Engine(model) will make, root first."""
    found = find_units(model)
    owner: dict[int, str] = {}
    sizes: Counter[str] = Counter()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = max((path for path in found if name.startswith(path + ".")), key=len, default="root")
        previous = owner.get(id(parameter))
        if previous is None:
            sizes[inside] += parameter.numel()
        elif previous != inside:  # tied between units: it belongs to what is around both
            sizes[previous] -= parameter.numel()
            sizes["root"] += parameter.numel()
            inside = "root"
        owner[id(parameter)] = inside
    root = Unit("root", type(model).__name__, sizes["root"])
    return [root, *(Unit(path, type(module).__name__, sizes[path]) for path, module in found.items())]


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
