"""Bytes of the tensors that are alive in a process, at a moment and in the course of a step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


def _tensors() -> Iterator[Tensor]:
    """Ordinary tensors that Python can reach, with their gradients; of a DTensor its local part."""
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor):
            continue
        gradient = found.grad if found.is_leaf else None
        for tensor in (found, gradient):
            if tensor is not None:
                yield getattr(tensor, "_local_tensor", tensor)


class Tracker:
    """Counts storages, each once, by their present size. One that Python reached in an earlier call is counted for as
    long as it lives, also if only C++ still holds it (DDP's buckets). What there was at the beginning is left out."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}
        self._find()
        self._before = set(self._seen)

    def _find(self) -> None:
        for tensor in _tensors():
            try:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            except (NotImplementedError, RuntimeError):  # no storage of its own
                continue
            self._seen.setdefault(reference.cdata, reference)

    def live_bytes(self) -> int:
        self._find()
        total = 0
        for address, reference in self._seen.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and address not in self._before:
                total += storage.nbytes()
        return total


@contextlib.contextmanager
def at_layers(sample: Callable[[], None], every: int) -> Iterator[None]:
    """Calls `sample` where a layer with parameters of its own has ended its forward, and again where its backward
    begins; of such layers it takes each `every`-th."""
    calls = 0

    def ended(layer: nn.Module, _: Any, output: Any) -> None:
        nonlocal calls
        if not isinstance(output, Tensor) or not layer._parameters:
            return
        calls += 1
        if calls % every == 0:
            sample()
            if output.requires_grad:
                output.register_hook(lambda _: sample())

    handle = nn.modules.module.register_module_forward_hook(ended)
    try:
        yield
    finally:
        handle.remove()
