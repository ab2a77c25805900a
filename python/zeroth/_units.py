"""Units: the modules that are gathered and reduced as one. By default the blocks of a model."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

from zeroth import _C, _names
from zeroth._tiled import tile_units, uses_of_tiles

__all__ = ["Unit", "described", "find_units", "kind_of", "named_units", "suggestion", "units", "with_tiles"]


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
_LARGE = 20
"""a module with less than one twentieth of the model's elements is not named as a possible unit"""


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """The default units, by path: from each ModuleList, Sequential or ModuleDict the members of one kind with at least
    two; and of all other modules the numbered submodules (layer0, layer1, ...) that are built alike.

    Without any the result is empty, and all parameters belong to the root unit. Members of a list inside a list count
    as members of the outer list. A list inside a unit makes no units. If a list has several kinds, the kind with the
    most members is taken, and among equal ones the kind with more parameters. Members of a ModuleDict and numbered
    submodules must hold layers: a single layer there may be used without a call, by its weight. Tiles of TiledLinear
    and TiledEmbedding are units wherever they are."""
    found: dict[str, nn.Module] = {}
    smallest = sum(parameter.numel() for parameter in model.parameters()) / _SMALLEST_LIST

    def take(groups: Iterable[dict[str, nn.Module]]) -> None:
        repeated = max(groups, key=lambda members: (len(members), _elements(members)), default={})
        if len(repeated) >= 2 and _elements(repeated) >= smallest and found.keys().isdisjoint(repeated):
            found.update(repeated)

    for path, module in model.named_modules():
        if _is_list(module) and not _inside(path, found):
            members = dict(_called(module, path))
            if isinstance(module, nn.ModuleDict):
                members = {name: member for name, member in members.items() if _holds_layers(member)}
            by_class = _grouped(members, lambda _, member: parametrize.type_before_parametrizations(member))
            take(by_class if any(len(group) >= 2 for group in by_class) else _grouped(members, _structure_of))
    for path, module in model.named_modules():
        if not _is_list(module) and not _inside(path, found):
            for alike in _grouped(dict(_numbered(module, path, found)), _stem_and_structure_of):
                take([alike])
    return with_tiles(model, found)


def with_tiles(model: nn.Module, found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """`found`, and the tiles of layers, also inside of it, in the order of the model."""
    every = {**found, **tile_units(model)}
    order = {path: number for number, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return dict(sorted(every.items(), key=lambda item: order[item[0]]))


def kind_of(module: nn.Module) -> str:
    """The class that a module's forward comes from. One that was derived for a single module, as by parametrizations,
    counts as its base."""
    owner = next((base for base in type(module).__mro__ if "forward" in vars(base)), nn.Module)
    return (type(module) if owner is nn.Module else owner).__qualname__


def described(model: nn.Module, found: Mapping[str, nn.Module]) -> list[tuple[str, int, str, int]]:
    """The units as C++ takes them: plain path, identity, class, and forwards of a micro-step."""
    uses = uses_of_tiles(model)
    return [
        (_names.plain(path), id(module), kind_of(module), uses.get(id(module), 1)) for path, module in found.items()
    ]


def suggestion(model: nn.Module, found: Mapping[str, nn.Module]) -> str:
    """For the log, where most of the model is in the root unit: the modules inside that could be units. "" if there is
    nothing to say."""
    sizes = {
        path: sum(parameter.numel() for parameter in module.parameters(recurse=True))
        for path, module in model.named_modules()
        if path and _has_forward(module) and not _inside(path, found) and not _holds(path, found)
    }
    whole = sum(parameter.numel() for parameter in model.parameters())
    fitting = [path for path, size in sizes.items() if size * _LARGE >= whole and 2 * size <= whole]
    outermost = [path for path in fitting if not any(path.startswith(f"{other}.") for other in fitting)]
    if not outermost:
        return ""
    names = ", ".join([*map(_expression, outermost[:3]), *(["..."] if len(outermost) > 3 else [])])
    return f"Engine(..., units=[{names}]) makes units of modules that the model calls"


def _expression(path: str) -> str:
    """ "model.body[0].linear" """
    parts = path.split(".")
    if not all(part.isidentifier() or part.isdigit() for part in parts):
        return f"model.get_submodule({path!r})"
    return "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and not isinstance(
        module, parametrize.ParametrizationList
    )


def _grouped(members: Mapping[str, nn.Module], key: Callable[[str, nn.Module], object]) -> list[dict[str, nn.Module]]:
    groups: defaultdict[object, dict[str, nn.Module]] = defaultdict(dict)
    for path, member in members.items():
        groups[key(path, member)][path] = member
    return list(groups.values())


def _structure_of(path: str, module: nn.Module) -> object:
    """Code, and the names and shapes of parameters: modules that are alike in these can take each other's place."""
    forward = getattr(getattr(type(module), "forward", None), "__code__", None)
    return forward, tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _stem_and_structure_of(path: str, module: nn.Module) -> object:
    return path.rstrip("0123456789"), _structure_of(path, module)


def _numbered(module: nn.Module, path: str, found: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules called layer0, layer1, ... that hold layers, and no unit. No lists, whose members may be called one by
    one."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        called = _has_forward(child) and not _is_list(child)
        if name[-1:].isdigit() and called and _holds_layers(child) and not _holds(inside, found):
            yield inside, child


def _holds_layers(module: nn.Module) -> bool:
    return any(next(part.parameters(), None) is not None for part in module.children())


def _holds(path: str, units: Iterable[str]) -> bool:
    return any(unit.startswith(f"{path}.") for unit in units)


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
