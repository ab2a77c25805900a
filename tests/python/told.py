"""What a rank of a test prints of an error, for the test that started it."""

from __future__ import annotations

from collections.abc import Callable

import zeroth


def told(name: str, rank: int, attempt: Callable[[], object]) -> None:
    """Prints the error that `attempt` must end with."""
    try:
        attempt()
    except zeroth.Error as error:
        print(f"{name}: rank {rank} is told {error}", flush=True)
    else:
        raise AssertionError("nothing was refused")
