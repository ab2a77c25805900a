"""How the layers of experts of a model are used."""

import dataclasses
import math
from collections.abc import Sequence

from torch import nn

__all__ = ["ExpertUse", "note", "noted", "report"]

_USE = "_zeroth_expert_use"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertUse:
    """Of one layer of experts, in its last forward on this rank."""

    name: str
    """of the layer's module"""
    chosen: tuple[int, ...]
    """choices of this rank's tokens, for each expert of the layer: those that were computed"""
    rows: tuple[int, ...]
    """tokens of all ranks that came to each of this rank's experts"""
    dropped: int
    """choices of this rank's tokens that were left out for want of capacity"""

    @property
    def entropy(self) -> float:
        """Of `chosen`, from 0, one expert for all, to 1, the same number for each."""
        total = sum(self.chosen)
        if total == 0 or len(self.chosen) < 2:
            return 0.0
        parts = [count / total for count in self.chosen if count]
        return min(1.0, -sum(part * math.log(part) for part in parts) / math.log(len(self.chosen)))


def note(module: nn.Module, chosen: Sequence[int], rows: Sequence[int], dropped: int = 0) -> None:
    """What the module's forward has just done."""
    object.__setattr__(module, _USE, (tuple(chosen), tuple(rows), dropped))


def noted(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """`chosen`, `rows` and `dropped` of the module's last note()."""
    return vars(module).get(_USE)


def report(model: nn.Module) -> list[ExpertUse]:
    """Of all layers that noted something, but those inside another one."""
    uses = {name: use for name, module in model.named_modules() if (use := noted(module)) is not None}
    return [ExpertUse(name, *use) for name, use in uses.items() if name.rpartition(".")[0] not in uses]
