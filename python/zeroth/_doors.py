"""Ways to the memory of a parameter that go past torch's operators: pickles, shared memory, storages.

A parameter that is not gathered has no memory. Operators say so by themselves; what reads a storage in C++ would end
the process, or say that "a python storage is invalid". The methods below ask first."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from zeroth import _C

__all__ = ["guard"]

_STORAGE = (
    "__getitem__",
    "__setitem__",
    "_share_fd_cpu_",
    "_share_filename_cpu_",
    "_write_file",
    "byteswap",
    "clone",
    "copy_",
    "cpu",
    "data_ptr",
    "fill_",
    "resize_",
    "share_memory_",
    "tolist",
)
_TYPED = ("__getitem__", "_getitem", "_share_memory_", "share_memory_", "tolist")
_TENSOR = ("set_", "share_memory_", "tolist")


def _storage_of(value: object) -> object:
    if isinstance(value, torch.TypedStorage):
        return value._untyped_storage
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        try:
            return value.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
            return None
    return value


def _asking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (self, *args, *kwargs.values()):
            if isinstance(value, (torch.UntypedStorage, torch.TypedStorage, torch.Tensor)):
                _C.require_memory(_storage_of(value))
        return method(self, *args, **kwargs)

    call._of_zeroth = True  # type: ignore[attr-defined]
    return call


def guard() -> None:
    """Once a process, before the first engine whose parameters are gathered."""
    doors = ((torch.UntypedStorage, _STORAGE), (torch.TypedStorage, _TYPED), (torch.Tensor, _TENSOR))
    for holder, names in doors:
        for name in names:
            method = getattr(holder, name, None)  # torch's private ones may go
            if method is not None and not getattr(method, "_of_zeroth", False):
                setattr(holder, name, _asking(method))
