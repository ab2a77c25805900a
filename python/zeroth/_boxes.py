"""What ranks share of a model: marks on its parameters, which an engine reads."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroth import _C

__all__ = [
    "Split",
    "box_of",
    "cut_later",
    "is_split",
    "later_of",
    "mark",
    "of_model",
    "own_parameters",
    "parts_of",
    "put_box",
    "put_parts",
    "split_of",
    "world_of",
]

_BOX = "_zeroth_box"
_SPLIT = "_zeroth_split"
_LATER = "_zeroth_cut_later"
_PARTS = "_zeroth_parts"


@dataclasses.dataclass(eq=False)
class Split:
    """That a model is split, and for which ranks. Copies of the model share it."""

    world: _C.World
    axes: dict[str, int]
    """sizes of the mesh's axes"""
    mesh: _C.Mesh
    boxes: dict[str, _C.ParameterBox] = dataclasses.field(default_factory=dict)
    """by names in the model that is split: copies of a Parameter have no marks"""
    verification: Any = None
    """a zeroth.parallel.verification.Verification of the model"""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Split":
        return self


def mark(model: nn.Module, split: Split) -> None:
    """Notes on the root module that it is split."""
    split.boxes = of_model(model)
    object.__setattr__(model, _SPLIT, split)


def split_of(model: nn.Module) -> Split | None:
    """What mark() noted on the model, or on a module inside."""
    return next((vars(module)[_SPLIT] for module in model.modules() if _SPLIT in vars(module)), None)


def is_split(model: nn.Module) -> bool:
    """Whether mark() was called for the model or a module inside."""
    return split_of(model) is not None


def world_of(model: nn.Module) -> _C.World | None:
    """The ranks that the model is split for."""
    split = split_of(model)
    return None if split is None else split.world


def put_box(parameter: nn.Parameter, box: _C.ParameterBox) -> None:
    """Notes what the parameter is of the whole model's."""
    setattr(parameter, _BOX, box)


def box_of(parameter: nn.Parameter) -> _C.ParameterBox | None:
    """What put_box() noted."""
    return getattr(parameter, _BOX, None)


def put_parts(parameter: nn.Parameter, parts: Iterable[nn.Parameter]) -> None:
    """Notes that there are several in the place of what the parameter was; it may be one of them."""
    setattr(parameter, _PARTS, tuple(parts))


def parts_of(parameter: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """What put_parts() noted; else the parameter itself."""
    return getattr(parameter, _PARTS, (parameter,))


def own_parameters(model: nn.Module, *, remove_duplicate: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Parameters with all their names, or with `remove_duplicate` the first one, but no names of what they are boxes
    of."""
    named = model.named_parameters(remove_duplicate=False)
    own = [
        (name, parameter) for name, parameter in named if (box := box_of(parameter)) is None or name not in box.names
    ]
    if not remove_duplicate:
        return own
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in own:
        first.setdefault(id(parameter), (name, parameter))
    return list(first.values())


def cut_later(parameter: nn.Parameter, whole: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of a parameter without values: cut(values of `whole`) are its values, once there are any."""
    setattr(parameter, _LATER, (whole, cut))


def later_of(parameter: nn.Parameter) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """What cut_later() noted; else the parameter's own data as they are."""
    noted: tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None = getattr(parameter, _LATER, None)
    return (parameter.data, lambda values: values) if noted is None else noted


def of_model(model: nn.Module) -> dict[str, _C.ParameterBox]:
    """All boxes, by the names of the parameters."""
    boxes = {
        f"{path}.{name}" if path else name: box
        for path, module in model.named_modules()
        for name, box in (vars(module)[_SPLIT].boxes.items() if _SPLIT in vars(module) else ())
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (box := box_of(parameter)) is not None:
            boxes[name] = box
    return boxes
