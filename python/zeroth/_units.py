"""Units: the modules that are gathered and reduced as one. By default the blocks of a model."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

from zeroth import _C

__all__ = ["Unit", "find_units", "units"]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of the model, as the engine makes it. A frozen value."""

    name: str
    """path of the module; "root" for the unit of all other parameters"""
    type: str
    """class name of the module"""
    num_params: int
    """number of elements of its own parameters; tied parameters count once"""


_SMALLEST_LIST = 100
"""a list with less than one hundredth of the model's elements stays in the root unit: units there would cost calls and
save no memory"""


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The default units, by path: from each ModuleList or Sequential the members of one class with at least two.

    Without such a list the result is empty, and all parameters belong to the root unit. Members of a list inside a list
    count as members of the outer list. A list inside a unit makes no units. If a list has several classes, the class
    with the most members is taken, and among equal ones the class with more parameters."""
    found: dict[str, nn.Module] = {}
    smallest = sum(parameter.numel() for parameter in model.parameters()) / _SMALLEST_LIST
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _inside(path, found):
            continue
        by_class: defaultdict[type, dict[str, nn.Module]] = defaultdict(dict)
        for name, member in _called(module, path):
            by_class[type(member)][name] = member
        repeated = max(by_class.values(), key=lambda members: (len(members), _elements(members)), default={})
        if len(repeated) >= 2 and _elements(repeated) >= smallest and found.keys().isdisjoint(repeated):
            found.update(repeated)
    return found


def _inside(path: str, units: Iterable[str]) -> bool:
    return any(path.startswith(f"{unit}.") or path == unit for unit in units)


def named_units(model: nn.Module, chosen: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The user's units, by path. Raises Error MODEL for a module that is not inside the model or has no forward."""
    wanted = {id(module): module for module in chosen}
    found = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if id(module) in wanted and name
    }
    missing = [module for key, module in wanted.items() if all(module is not other for other in found.values())]
    if missing:
        raise _C.make_error("MODEL", f"a unit is not a module inside the model: {type(missing[0]).__name__}")
    for name, module in found.items():
        if not _has_forward(module):
            raise _C.make_error(
                "MODEL",
                "a unit is never called, so its parameters would never be gathered",
                where="python.units",
                which=name,
                expected="a module with a forward",
                got=f"{type(module).__name__}, a container",
                hint="name the modules inside it",
            )
    return found


def units(model: nn.Module) -> list[Unit]:
    """Returns the units that Engine(model) will make, root first. Local; `model` is not changed."""
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


def _called(container: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Members with parameters. A member that is itself a container is replaced by its members."""
    for name, child in container.named_children():
        inside = f"{path}.{name}" if path else name
        if not _has_forward(child):
            yield from _called(child, inside)
        elif next(child.parameters(), None) is not None:
            yield inside, child


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward or "forward" in vars(module)


def _elements(modules: dict[str, nn.Module]) -> int:
    return sum(parameter.numel() for module in modules.values() for parameter in module.parameters())
