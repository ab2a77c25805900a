"""The cases of a rank program: functions that its command line names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def run(functions: Mapping[str, Callable[..., Any]], names: Iterable[str], *arguments: Any) -> None:
    """One after the other, each with these arguments."""
    for name in names:
        functions[name](*arguments)
        print(f"{name}: ok")
