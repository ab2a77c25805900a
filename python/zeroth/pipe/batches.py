"""Micro-batches: how many a step is given, what of one a model takes, and what its loss."""

import itertools
from collections.abc import Iterable
from typing import Any

from zeroth.parallel._refuse import refuse

__all__ = ["parts_of", "take"]


def parts_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels. A tuple or list of two is a pair of them; anything else is both, so that a layer and a loss
    take what they need from it."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, batch


def take(batches: Iterable[Any], count: int, *, where: str, who: str, action: str = "") -> list[Any]:
    """The next `count` micro-batches. Raises Error MISMATCH, with nothing run, if there are fewer. `action`: the
    beginning of the name of those that they are for, "1F"."""
    taken = list(itertools.islice(batches, count))
    if len(taken) < count:
        refuse(
            "there are too few micro-batches for a step",
            code="MISMATCH",
            where=where,
            who=who,
            which=f"micro-batch {len(taken)}" + (f", of action {action}{len(taken)}" if action else ""),
            expected=f"{count} micro-batches",
            got=str(len(taken)),
            hint="a step takes gradient_accumulation_steps micro-batches, the same on every stage of a pipeline",
        )
    return taken
