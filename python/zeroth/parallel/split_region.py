"""Dropout of tensor-parallel layers: equal on all ranks where values are whole, different where they are split."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel._random import mixed

__all__ = ["SplitRegion"]


class SplitRegion:
    """Between a module's begin and its row-parallel layer, each rank draws numbers of its own.

    The numbers follow from torch's default generator, which moves by one draw. So ranks that were equal stay equal, and
    activation checkpointing, which restores the generator, gets the same numbers again.

    Adapters on column layers have dropouts of what is whole: these draw equal numbers inside, too."""

    def __init__(
        self,
        module: nn.Module,
        row: nn.Module,
        group: _C.Communicator,
        *,
        adapted: bool = False,
        of_whole: Iterable[nn.Module] = (),
    ) -> None:
        """`row`: the row-parallel layer, or with `adapted` the module that has it and its adapters, after which values
        are whole. `of_whole`: dropouts inside of values that are whole."""
        self.group = group
        self.before: torch.Tensor | None = None
        self._equal: torch.Tensor | None = None
        """the generator's state for what is whole"""
        self._own: torch.Tensor | None = None
        module.register_forward_pre_hook(self._enter)
        if adapted:
            row.register_forward_hook(self._end, always_call=True)
        else:
            row.register_forward_pre_hook(self._leave)
        module.register_forward_hook(self._end, always_call=True)
        for dropout in of_whole:
            dropout.register_forward_pre_hook(self._enter_whole)
            dropout.register_forward_hook(self._leave_whole, always_call=True)

    @staticmethod
    def draws(module: nn.Module) -> bool:
        """Whether the module has a dropout, as a layer or as a number of its own."""
        layers = any(isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0 for one in module.modules())
        return layers or any(
            "drop" in name and isinstance(value, float) and value > 0
            for one in module.modules()
            for name, value in vars(one).items()
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not module.training or self.group.size == 1 or self.before is not None:
            return
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
        self.before = torch.get_rng_state()
        torch.default_generator.manual_seed(mixed(seed, self.group.size))
        self._equal = torch.get_rng_state()
        torch.default_generator.manual_seed(mixed(seed, self.group.rank))

    def _leave(self, *_: Any) -> None:
        if self.before is not None:
            torch.set_rng_state(self.before)
            self.before = None

    def _end(self, *_: Any) -> None:
        self._leave()

    def _enter_whole(self, *_: Any) -> None:
        if self.before is not None and self._equal is not None:
            self._own = torch.get_rng_state()
            torch.set_rng_state(self._equal)

    def _leave_whole(self, *_: Any) -> None:
        if self._own is not None:
            self._equal = torch.get_rng_state()
            torch.set_rng_state(self._own)
            self._own = None
