"""What of a micro-batch a model takes, and what its loss."""

from typing import Any

__all__ = ["parts_of"]


def parts_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and labels. A tuple or list of two is a pair of them; anything else is both, so that a layer and a loss
    take what they need from it."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, batch
