"""Buffers that a forward writes, for one that runs a second time: it reads what the first one read, and counts nothing.

Statistics of batches (running_mean, num_batches_tracked) and vectors of a power iteration are such."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn

__all__ = ["Before", "run_noting", "unchanged"]

_Result = TypeVar("_Result")
Before = dict[str, torch.Tensor | None]
"""buffers that a forward has written, by name, with their earlier values; None: not known"""


def run_noting(module: nn.Module, run: Callable[[], _Result], known: set[str] | None) -> tuple[_Result, Before]:
    """The result of `run`, a forward of the module, and what it has written. `known`: the buffers that earlier ones
    wrote, which alone are copied before, with statistics of batches; None: there was none, so all are. Torch counts no
    write of those statistics, so copies are compared."""
    buffers = dict(module.named_buffers())
    copied = buffers.keys() if known is None else known | _statistics(module)
    earlier = {name: one.detach().clone() for name, one in buffers.items() if name in copied}
    versions = {name: one._version for name, one in buffers.items()}
    result = run()
    before: Before = {}
    for name, one in module.named_buffers():
        if name not in buffers:
            continue
        is_other = buffers[name] is not one or one._version != versions[name]
        if is_other or (name in earlier and not torch.equal(earlier[name], one)):
            before[name] = earlier.get(name)
    return result, before


def _statistics(module: nn.Module) -> set[str]:
    """Names of the buffers of batch norms and the like."""
    return {
        f"{path}.{name}" if path else name
        for path, inside in module.named_modules()
        if isinstance(inside, nn.modules.batchnorm._NormBase) and inside.training
        for name, _ in inside.named_buffers(recurse=False)
    }


@contextlib.contextmanager
def unchanged(module: nn.Module, before: Before) -> Iterator[None]:
    """In here the buffers have their values of `before`; afterwards those of now. Graphs that have saved them do not
    see it."""
    buffers = {name: one for name, one in module.named_buffers() if name in before}
    now: Before = {name: one.detach().clone() for name, one in buffers.items()}
    _write(buffers, before)
    try:
        yield
    finally:
        for name, buffer in buffers.items():  # where the forward has put another tensor there
            path, _, own = name.rpartition(".")
            module.get_submodule(path)._buffers[own] = buffer
        _write(buffers, now)


def _write(buffers: dict[str, torch.Tensor], values: Before) -> None:
    chosen = [(buffers[name], value) for name in buffers if (value := values[name]) is not None]
    if not chosen:
        return
    with (
        torch.no_grad(),
        torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffer for buffer, _ in chosen)),
    ):
        for buffer, value in chosen:
            buffer.copy_(value)
