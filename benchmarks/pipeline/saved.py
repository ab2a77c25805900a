"""Bytes that autograd keeps for the backward, by torch's own hooks: the same for whoever runs the forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Saved:
    """Storages of floating-point values that were saved for a backward and are alive, each once. A storage stays
    counted for as long as it is alive, also if the graph has let it go and somebody else holds it, as buffers of
    received values. Integers are the user's: tokens and labels."""

    def __init__(self, without: list[Tensor]) -> None:
        self._without = {one.untyped_storage().data_ptr() for one in without}
        self._alive: dict[int, StorageWeakRef] = {}
        self.peak = 0
        """most bytes at any time"""

    def bytes(self) -> int:
        total = 0
        for address, reference in list(self._alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[address]
            else:
                total += storage.nbytes()
        return total

    def see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in self._without:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            if reference.cdata not in self._alive:
                self._alive[reference.cdata] = reference
                self.peak = max(self.peak, self.bytes())
        return tensor

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In here all that is saved is seen."""
        with torch.autograd.graph.saved_tensors_hooks(self.see, lambda tensor: tensor):
            yield


def check() -> None:
    """Three linears without bias save their inputs and no weights; a second graph at the same time, as much again."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3)))
    saved = Saved(list(layers.parameters()))
    kib = torch.zeros(1, 256)
    with saved.watching():
        for _ in range(2):
            layers(kib.clone()).sum().backward()
        assert saved.peak == 3 * 1024, saved.peak
        graphs = [layers(kib.clone()).sum() for _ in range(2)]
    assert saved.peak == 6 * 1024, saved.peak
    del graphs
    assert saved.bytes() == 0, saved.bytes()


if __name__ == "__main__":
    check()
