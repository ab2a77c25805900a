"""Modules that look along a split sequence by calls of their own over sp.

[Note: Modules that communicate] Such a module has only a meaning with this rank's tokens. So in a run with whole
sequences it gets these, and what it returns is made whole: it is taken as it is, and all around it is compared. It is
known by the bytes that come along sp in its forward, without an attention of transformers' interface.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroth import _C
from zeroth.parallel.hf_attention import SequenceBinding
from zeroth.parallel.layout import SequenceLayout
from zeroth.parallel.verify_runs import is_of_transport

__all__ = ["gathered", "give_own_tokens", "has_tokens", "talking"]


def talking(
    modules: Mapping[str, nn.Module],
    run: Callable[[], object],
    meshes: Sequence[_C.Mesh],
    binding: SequenceBinding,
    agree: _C.Communicator,
) -> list[str]:
    """Paths of the innermost of `modules` that communicate in a run of the split model. Those of any rank of `agree`:
    the first one of a chain receives nothing."""

    def bytes_so_far() -> int:
        return sum(mesh.received()["sp"] for mesh in meshes)

    numbers = {module: number for number, module in enumerate(modules.values())}
    received, attends = torch.zeros(len(numbers)), torch.zeros(len(numbers))
    begun: list[tuple[int, int]] = []

    def before(*_: Any) -> None:
        begun.append((bytes_so_far(), binding.calls))

    def after(module: nn.Module, *_: Any) -> None:
        if begun:
            bytes_before, calls_before = begun.pop()
            received[numbers[module]] += bytes_so_far() - bytes_before
            attends[numbers[module]] += binding.calls - calls_before

    with contextlib.ExitStack() as stack:
        for module in numbers:
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        try:
            run()
        except Exception as error:  # it is looked at where outputs are compared
            if is_of_transport(error):
                raise
    agree.all_reduce(received, "max")
    found = [path for path, one in modules.items() if received[numbers[one]] > 0 and attends[numbers[one]] == 0]
    return [path for path in found if not any(one.startswith(f"{path}.") for one in found)]


def give_own_tokens(
    module: nn.Module, layout: SequenceLayout, group: _C.Communicator, stack: contextlib.ExitStack
) -> None:
    """Until `stack` ends the module gets this rank's tokens of whole sequences, and what it returns is made whole."""

    def cut(one: Any) -> Any:
        return layout.cut(one, 1, group.rank) if has_tokens(one, layout.length) else one

    def whole(one: Any) -> Any:
        return gathered(one, layout, group) if has_tokens(one, layout.lengths[group.rank]) else one

    before = module.register_forward_pre_hook(
        lambda _, args, kwargs: tree_map(cut, (args, kwargs)), prepend=True, with_kwargs=True
    )
    after = module.register_forward_hook(lambda _, args, output: tree_map(whole, output))
    stack.callback(before.remove)
    stack.callback(after.remove)


def has_tokens(value: Any, count: int) -> bool:
    """Whether it is a tensor with so many tokens along dimension 1."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == count


def gathered(tensor: torch.Tensor, layout: SequenceLayout, group: _C.Communicator) -> torch.Tensor:
    """The whole sequences of a tensor [..., this rank's tokens, ...] along dimension 1. No gradient flows."""
    rows = tensor.detach().movedim(1, 0).contiguous()
    every = _C.gather_from_group(rows, 0, group, layout.lengths)
    return layout.join(every, 0).movedim(0, 1)
