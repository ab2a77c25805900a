"""Copies of modules on the meta device, and how they run there: shapes without memory and without arithmetic."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from zeroth import _deferred

__all__ = ["ZerosForValues", "meta_copy", "on_meta", "to_meta"]


def to_meta(value: Any) -> Any:
    """The same tree, with tensors on the meta device in the place of others."""
    return tree_map(lambda leaf: _empty(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


class _CopyToMeta(TorchFunctionMode):
    """copy.deepcopy() of a tensor gives one on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _empty(tensor)
        return memo[id(tensor)]


def meta_copy(model: nn.Module) -> nn.Module:
    """A deep copy without memory: parameters, buffers and all other tensors are on the meta device. Parameters that are
    one in the model are one in the copy. Hooks are copied, too."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, _deferred.Recording):
                memo[id(value)] = None  # how values are made is the model's
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_empty(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _empty(buffer)
    memo[id(memo)] = list(itertools.chain(model.parameters(), model.buffers()))  # their ids stay theirs
    with _CopyToMeta():
        return copy.deepcopy(model, memo)


class ZerosForValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What needs values gets those of zeros, computed on the CPU: a comparison that chooses a way, the number of
    elements that a mask selects."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports all of dynamo (900 modules) to keep it away from each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            if not _has_meta((args, kwargs)):
                raise
        to_cpu = torch.device(kwargs.get("device") or "meta").type == "cpu"
        made = func(*tree_map(_zeros, args), **tree_map(_zeros, kwargs))
        return made if to_cpu else to_meta(made)


def _has_meta(tree: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # one that the model holds beside its buffers may be on a GPU
        return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.cpu()
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """In here modules of meta_copy() run, without gradients; new tensors are on the meta device, too."""
    with torch.no_grad(), torch.device("meta"), ZerosForValues():  # type: ignore[no-untyped-call]
        yield
