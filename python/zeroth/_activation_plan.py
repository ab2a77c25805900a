"""Which activations stay, are computed again, or move to files: by measured figures of the units and the disk."""

import dataclasses
from collections.abc import Sequence

from zeroth import _C

__all__ = ["ActivationPlan", "UnitCost", "plan_activations"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """A unit of the model, as plan_activations() sees it."""

    name: str
    """for the table"""
    saved_bytes: int
    """what its forward saves for backward"""
    input_bytes: int
    """what a recompute needs: its input"""
    forward_s: float
    """seconds of its forward"""
    backward_s: float
    """seconds of its backward, without a recompute"""
    recompute_s: float | None = None
    """seconds of a recompute; None: as forward_s"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPlan:
    """The choices with the least step time."""

    choices: tuple[str, ...]
    """of each unit: "keep", "recompute", "move" (all that is saved), "recompute+move" (the input alone)"""
    step_s: float
    """seconds of forward and backward by the cost model"""
    resident_bytes: int
    """in memory between forward and backward"""
    moved_bytes: int
    """to the files, and back"""
    exact: bool
    """False: there were too many different units to look at all choices"""
    text: str
    """the table that says why"""

    def __str__(self) -> str:
        return self.text


def plan_activations(
    units: Sequence[UnitCost], *, memory_bytes: int, write_bytes_per_s: float = 0.0, read_bytes_per_s: float = 0.0
) -> ActivationPlan:
    """Chooses for each unit under a cap of `memory_bytes` between forward and backward. The bandwidths are those of the
    files, say of `zeroth-bench io`; 0: nothing can move. The cost model: step = max(sum of forwards, moved / write) +
    max(sum of backwards and recomputes, moved / read). Pure and local. Raises Error OUT_OF_MEMORY, with the least cap
    that would do, and USAGE for numbers that are none."""
    found = _C.plan_activations(
        units=[
            (
                unit.name,
                unit.saved_bytes,
                unit.input_bytes,
                unit.forward_s,
                unit.backward_s,
                unit.forward_s if unit.recompute_s is None else unit.recompute_s,
            )
            for unit in units
        ],
        write_bytes_per_s=write_bytes_per_s,
        read_bytes_per_s=read_bytes_per_s,
        memory_bytes=memory_bytes,
    )
    return ActivationPlan(**{**found, "choices": tuple(found["choices"])})
