"""Finds tensors in inputs and outputs of modules that are not tuples, lists or dicts. The native module handles those
three."""

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils import _pytree

__all__ = ["parts"]


def parts(value: Any) -> Collection[Any]:
    """The values directly inside `value`; empty if it holds none."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if type(value) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    if isinstance(value, type) or callable(value):
        return []
    slots = [
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]
    inside = [getattr(value, name, None) for name in slots]
    return inside + list(getattr(value, "__dict__", {}).values())


# Keeps parts() out of the graphs of torch.compile. torch.compiler.disable() does the same, but imports all of dynamo.
set_code_exec_strategy(parts.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
