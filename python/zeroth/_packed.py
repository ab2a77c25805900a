"""Rows of several documents through models of transformers.

position_ids that start again say where documents begin, and a model's masks follow them, unless it makes a cache of
keys and values, as it does by default: then documents see each other, without a word. Nobody who packs rows needs one.
"""

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["keep_apart"]


def keep_apart(model: nn.Module) -> list[RemovableHandle]:
    """Hooks by which the models of transformers inside make no cache in calls with packed rows."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{one}.") if one else True for one in found)
        if not inside and hasattr(module, "config") and hasattr(module, "base_model_prefix"):
            with contextlib.suppress(TypeError, ValueError):  # no signature
                if "use_cache" in inspect.signature(module.forward).parameters:
                    found[path] = module
    return [module.register_forward_pre_hook(_without_cache, with_kwargs=True) for module in found.values()]


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    positions = kwargs.get("position_ids")
    if positions is None and len(args) < 2:  # the first one is what has no positions
        return None
    given = dict(kwargs)
    with contextlib.suppress(TypeError):  # its own error says it better
        given |= inspect.signature(module.forward).bind_partial(*args).arguments
    positions = given.get("position_ids")
    said = any(given.get(name) is not None for name in ("use_cache", "past_key_values", "attention_mask"))
    if said or not isinstance(positions, torch.Tensor) or positions.is_meta or torch.compiler.is_compiling():
        return None
    from zeroth.parallel.masks import documents_of  # it needs what this module needs

    if positions.dim() < 2 or documents_of(positions if positions.dim() == 2 else positions[0]) is None:
        return None
    return args, {**kwargs, "use_cache": False}
