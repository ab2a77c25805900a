"""What autograd saved of one forward of a chunk, moved away and brought back by actions of a program."""

import weakref

import torch

from zeroth import _C
from zeroth.parallel._refuse import refuse

__all__ = ["Held"]


class _Tensor:
    """One saved tensor. The graph owns it."""

    __slots__ = ("__weakref__", "_away", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()  # with the counter of versions
        self._version = tensor._version
        self._away: _C.SavedTensor | None = None

    def move(self, tensors: _C.SavedTensors) -> None:
        tensor = self.unpack()
        away = tensors.pack(tensor, True)
        if away.moved:
            self._away, self._tensor = away, None

    def fetch(self) -> None:
        if self._away is not None:
            self._tensor, self._away = self._away.unpack(), None
            self._version = self._tensor._version

    def unpack(self) -> torch.Tensor:
        assert self._tensor is not None, "a FETCH comes before the use"
        if self._tensor._version != self._version:
            refuse(
                "one of the variables needed for gradient computation has been modified by an inplace operation",
                where="pipe.held",
                which=f"{self._tensor.dtype} {list(self._tensor.shape)}",
                expected=f"version {self._version}",
                got=f"version {self._tensor._version}",
            )
        return self._tensor


class Held:
    """Enter hooks() for the forward; move() and fetch() come once each, before the backward."""

    def __init__(self) -> None:
        self._saved: list[weakref.ref[_Tensor]] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _Tensor.unpack)

    def _pack(self, tensor: torch.Tensor) -> _Tensor:
        saved = _Tensor(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def move(self, tensors: _C.SavedTensors) -> None:
        """Starts to write. Blocks while the memory for what is on its way is full."""
        for saved in self._alive():
            saved.move(tensors)

    def fetch(self) -> None:
        """Blocks until all is there. The backward begins with what was saved last; that is read first."""
        for saved in reversed(self._alive()):
            saved.fetch()

    def _alive(self) -> list[_Tensor]:
        return [saved for one in self._saved if (saved := one()) is not None]
