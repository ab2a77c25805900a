"""That something is refused; for programs of ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import zeroth


@contextlib.contextmanager
def refused(code: str, pattern: str) -> Iterator[None]:
    """The block must raise an Error with this code and a text that the pattern finds."""
    try:
        yield
    except zeroth.Error as error:
        assert error.code == code and re.search(pattern, str(error)), f"{error.code}: {error}\nis not {code}: {pattern}"
        return
    raise AssertionError(f"not refused: {pattern}")
