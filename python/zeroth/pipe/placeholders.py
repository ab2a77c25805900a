"""What stands in for the outputs of modules whose parameters another rank has."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from zeroth import _boxes
from zeroth.pipe.meta import on_meta, to_meta

__all__ = ["Placeholders"]

_KEPT = 256
"""shapes of outputs"""


class Placeholders:
    """Zeros of the shapes and dtypes that modules would return, which a copy on the meta device says."""

    def __init__(self, copied: nn.Module, solid: Collection[str]) -> None:
        """`solid`: modules whose output is written in place, so it needs memory."""
        self._copied = copied
        self._solid = solid
        self._known: dict[Any, Any] = {}

    def of(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The output of `module`, which is `path` in the copy."""
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        dtypes = _dtypes_of(module)
        key = path, spec, dtypes, device, tuple(map(_form, leaves))
        made = self._known.get(key)
        if made is None:
            made = self._run(self._copied.get_submodule(path), dtypes, args, kwargs)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = made

        def zeros(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if path in self._solid:
                return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
            return torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)

        return _pytree.tree_map(zeros, made)

    def _run(self, copied: nn.Module, dtypes: tuple[torch.dtype, ...], args: Any, kwargs: Any) -> Any:
        for parameter, dtype in zip(copied.parameters(), dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)  # the model may have been cast since
        with on_meta():
            return copied(*to_meta(args), **to_meta(kwargs))


def _dtypes_of(module: nn.Module) -> tuple[torch.dtype, ...]:
    """Of its parameters in the whole model; boxes of one tensor are one."""
    dtypes: dict[object, torch.dtype] = {}
    for parameter in module.parameters():
        box = _boxes.box_of(parameter)
        dtypes[tuple(box.names) if box is not None and box.names else id(parameter)] = parameter.dtype
    return tuple(dtypes.values())


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return repr(leaf)
