"""Records the parameters, submodules and buffers of a module, and detects later changes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroth import _C, _names

__all__ = ["Buffer", "Watched", "buffers", "follow", "held"]

Watched = list[tuple[dict[str, Any], tuple[Any, ...] | int]]
"""dictionaries of modules, each with its values, or with the number of its values if these may change"""

Buffer = tuple[dict[str, Any], str, str, torch.Tensor | None, bool]
"""a buffer: the module's `_buffers` and the key there; its plain name; the tensor or None; True if it is persistent"""


def held(model: nn.Module) -> Watched:
    """The parameters and submodules of each module, and the number of its buffers. Scripted modules are left out: they
    store them elsewhere and do not change."""
    watched: Watched = []
    for module in model.modules():
        for holder in (module._parameters, module._modules):
            if isinstance(holder, dict):
                watched.append((holder, tuple(holder.values())))
        if isinstance(module._buffers, dict):
            watched.append((module._buffers, len(module._buffers)))
    return watched


def buffers(model: nn.Module) -> list[Buffer]:
    """All buffers of the module, also those that are None now."""
    found: list[Buffer] = []
    for path, module in model.named_modules(remove_duplicate=False):
        passing: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for key, tensor in module._buffers.items():
            holder = module._buffers if isinstance(module._buffers, dict) else {key: tensor}
            name = _names.plain(f"{path}.{key}" if path else key)
            found.append((holder, key, name, tensor, key not in passing))
    return found


def follow(model: nn.Module) -> Callable[[nn.Module, str, str], None]:
    """Returns a function (module, where, hint) that checks a changed module. Allowed: wrapping modules, removing them
    for an evaluation, new buffers, new frozen parameters, torch.func.functional_call() with other tensors. Raises Error
    MODEL if a parameter of the engine is gone, or a new trainable parameter has come."""
    known = {
        id(parameter): (f"{path}.{key}" if path else key, weakref.ref(module))
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    }
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def require_same(module: nn.Module, where: str, hint: str) -> None:
        # torch.func.functional_call() lends tensors that are no Parameters to a call; nobody else can put them there.
        lent = {
            f"{path}.{key}" if path else key
            for path, part in module.named_modules()
            for key, value in part._parameters.items()
            if value is not None and not isinstance(value, nn.Parameter)
        }
        now = {id(parameter): (name, parameter) for name, parameter in module.named_parameters() if name not in lent}
        inside = set(module.modules())
        trains = module.training and where == "python.forward"
        gone = [
            name
            for key, (name, owner) in known.items()
            if key not in now and name not in lent and (owner() in inside or (trains and key in trainable))
        ]
        added = [name for key, (name, parameter) in now.items() if key not in known and parameter.requires_grad]
        if gone or added:
            missing = any(key not in now for key in known)
            raise _C.make_error(
                "MODEL",
                f"a parameter was {'replaced or removed' if missing else 'added'} after the engine was built",
                where=where,
                which=(gone or added)[0],
                expected="the trainable parameters that the engine was built with",
                hint=hint,
            )

    return require_same
