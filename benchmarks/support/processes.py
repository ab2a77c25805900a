"""Processes seen from outside. Plain Python 3."""

from __future__ import annotations

import pathlib


def children(pid: int) -> list[int]:
    """Direct and indirect children."""
    found: list[int] = []
    try:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            for word in (task / "children").read_text(encoding="utf-8").split():
                found += [int(word), *children(int(word))]
    except OSError:
        pass  # it has ended
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes, which counts a page that n processes share as a n-th; 0 for one that has
    ended."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
