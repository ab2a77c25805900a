"""How ranks share the modules of a model: values."""

import dataclasses
import re
from typing import Literal

from torch import nn

__all__ = ["ROLES", "Role", "Share", "TensorPlan", "inputs_of", "is_linear", "outputs_of"]

Role = Literal["column", "row", "vocab", "head", "heads", "summed", "whole"]
ROLES: tuple[Role, ...] = ("column", "row", "vocab", "head", "heads", "summed", "whole")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What ranks share of one module. A frozen value."""

    name: str
    """of the module"""
    role: Role
    """column: parts of the outputs; row: parts of the inputs; vocab: rows of an embedding; head: column, outputs are a
    vocabulary; heads: an embedding with a column a head, or a parameter with a value a head; summed: whole, its
    gradient is a sum over the ranks; whole: not shared"""
    grain: int = 1
    """outputs (inputs of a row) that stay together: the size of a head"""
    heads: int = 0
    """of grain; fewer than ranks are copied to neighbours"""
    parts: int = 1
    """equal blocks of the outputs, each shared like this: query, key and value in one matrix"""
    why: str = ""
    """for what is not shared"""
    adapter: bool = False
    """it belongs to an adapter, and has the role from the layer that this one sits on"""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlan:
    """How ranks share the modules of a model."""

    shares: tuple[Share, ...]
    attributes: tuple[tuple[str, str, int], ...] = ()
    """(module, attribute, value on a rank): what modules count by themselves, as their heads"""

    def text(self, ranks: int) -> str:
        """A table: layers that differ in their number only are one row."""
        rows: dict[tuple[str, ...], int] = {}
        for share in self.shares:
            grain = f"{share.heads} x {share.grain}" if share.heads else ""
            blocks = f"{share.parts} blocks" if share.parts > 1 else ""
            name, why = (re.sub(r"\.\d+(?=\.)", ".*", text) for text in (share.name, share.why))
            row = (name, share.role, grain or blocks, why)
            rows[row] = rows.get(row, 0) + 1
        cells = [("module", "shared", "heads", "times", "")]
        cells += [(name, role, grain, str(count), why) for (name, role, grain, why), count in rows.items()]
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([f"tensor parallelism over {ranks} ranks:", *lines])


def is_linear(module: nn.Module) -> bool:
    """nn.Linear or one of transformers' own: another class might compute more."""
    kind = type(module)
    return kind.forward is nn.Linear.forward or (
        kind.__name__ in ("Conv1D", "FalconLinear") and kind.__module__.startswith("transformers.")
    )


def inputs_of(module: nn.Module) -> int:
    """Of a linear layer."""
    return int(module.weight.shape[1 if isinstance(module, nn.Linear) else 0])  # type: ignore[index]


def outputs_of(module: nn.Module) -> int:
    """Of a linear layer."""
    return int(module.weight.shape[0 if isinstance(module, nn.Linear) else 1])  # type: ignore[index]
