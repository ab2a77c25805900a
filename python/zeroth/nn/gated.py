"""What layers with a gate of experts have alike."""

from typing import Any

from torch import nn

from zeroth import _C, _expert_use

__all__ = ["GatedLayer"]


class GatedLayer(nn.Module):
    """A layer whose `_gate` chooses experts. zeroth.Engine calls balance_over() and begin_step(). A subclass makes the
    gate in _made_gate(), and sets it at the end of its constructor."""

    _gate: _C.Gate

    def _made_gate(self) -> _C.Gate:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Copies have a gate of their own, on no ranks."""
        return {**self.__dict__, "_gate": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._gate = self._made_gate()

    def balance_over(self, mesh: _C.Mesh) -> None:
        """The ranks along dp, ep and sp have other tokens of one batch: the balance is over all of them."""
        self._gate.balance_over(_expert_use.groups_of(mesh))

    def begin_step(self) -> None:
        """The next forward is of a new batch: the balance forgets the micro-batches so far."""
        self._gate.begin_step()
