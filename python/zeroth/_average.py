"""Averages of weights over steps, kept where the optimizer's states are."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zeroth._access import Ranks, names_of

if TYPE_CHECKING:
    from zeroth._engine import Engine

__all__ = ["Average"]


class Average:
    """An exponential moving average of an engine's weights: average = decay * average + (1 - decay) * weights.

    It is of the masters, in float32 (float64 for float64 weights), on each rank for the part that this rank updates:
    no copy of the model. The same bits at every ZeRO stage. It is a state of the engine under its name:
    engine.full(weight, name), engine.save() and engine.load() have it. Frozen weights have none, and buffers are not
    averaged. Collective and blocking, between steps: make it on all ranks, before engine.load(). It begins as the
    weights. Raises Error USAGE for a name that is taken.
    """

    def __init__(self, engine: "Engine", decay: float = 0.999, *, name: str = "average") -> None:
        """`engine`: whose weights. `decay`: from 0 to 1. `name`: of the state; several averages need several."""
        self.decay = decay
        """of the next update()"""
        self._engine = engine
        self._name = name
        engine._core.add_average(name)

    @property
    def name(self) -> str:
        """The kind of state that it is."""
        return self._name

    def update(self, decay: float | None = None) -> None:
        """Moves the average towards the weights of now. Call it after step(), on all ranks. No communication. `decay`:
        in the place of the average's own; 0 begins anew with the weights. Raises Error USAGE."""
        self._engine._core.update_average(self._name, self.decay if decay is None else decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While the context is open the module has the averaged weights; afterwards its own, bit for bit. For
        evaluation and exports: step(), save() and writes of weights are refused. No memory beyond the average.
        Collective and blocking, between steps. Raises Error USAGE in the middle of a step."""
        self._engine._core.swap_average(self._name)
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            self._engine._core.swap_average(self._name)
            torch.clear_autocast_cache()

    def state_dict(self, *, ranks: Ranks = 0) -> dict[str, torch.Tensor]:
        """The averaged weights by the names of the module's state_dict(), with frozen weights and buffers as they are.
        CPU tensors of the masters' dtype on `ranks` (one, several, or None for all), an empty dictionary on the others.
        Collective and blocking."""
        engine = self._engine
        found = dict(engine.state_dict_items(self._name, ranks=ranks))
        for name, tensor in engine.state_dict_items(ranks=ranks):
            found.setdefault(name, tensor)
        return {name: found[name] for name in names_of(engine.module) if name in found}

    def export_safetensors(self, path: str | os.PathLike[str]) -> None:
        """Engine.export_safetensors() of the averaged weights. Collective and blocking, between steps."""
        with self.applied():
            self._engine.export_safetensors(os.fspath(path))
