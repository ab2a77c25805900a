"""A part of a page of the documentation, between two marks, that a program writes. Plain Python 3."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]


def with_part(text: str, begin: str, end: str, part: str) -> str:
    """The page with `part` between the marks, each on a line of its own."""
    before, rest = text.split(begin, 1)
    _, after = rest.split(end, 1)
    return f"{before}{begin}\n{part}\n{end}{after}"


def main(
    page: pathlib.Path,
    page_with: Callable[[str, pathlib.Path], str],
    printed: Callable[[pathlib.Path], str],
) -> None:
    """With --page writes the committed results into the page, else prints them."""
    results = ROOT / "benchmarks/results"
    if "--page" in sys.argv[1:]:
        page.write_text(page_with(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    else:
        print(printed(results))
