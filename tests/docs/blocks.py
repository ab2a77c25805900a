#!/usr/bin/env python3
"""The code blocks of README.md and docs/, and files of those that compilers and CMake read.

usage: blocks.py ROOT FOLDER

Writes number N, from 1, of a page's blocks of one language as FOLDER/PAGE-N.LANGUAGE: docs/cpp-api-2.cpp. Plain Python
3.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import sys

FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*(\S*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """What stands between two fences, from the line after `line`."""

    page: str
    line: int
    language: str
    number: int
    text: str

    @property
    def file(self) -> str:
        return f"{self.page.removesuffix('.md')}-{self.number}.{self.language}"

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, without comments; those that && joins by themselves."""
        lines = [re.sub(r"(^|\s)#.*", "", line) for line in self.text.splitlines()]
        return [command.strip() for line in lines for command in line.split("&&") if command.strip()]


def without_fences(text: str) -> str:
    """The text with fenced code blanked; line numbers stay."""
    return FENCE.sub(lambda fence: "\n" * fence.group().count("\n"), text)


def blocks_of(page: str, text: str) -> list[Block]:
    numbers: collections.Counter[str] = collections.Counter()
    blocks = []
    for fence in FENCE.finditer(text):
        language = fence[2]
        numbers[language] += 1
        blocks.append(Block(page, text.count("\n", 0, fence.start()) + 1, language, numbers[language], fence[3]))
    return blocks


def all_blocks(root: pathlib.Path) -> list[Block]:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        block
        for page in pages
        for block in blocks_of(page.relative_to(root).as_posix(), page.read_text(encoding="utf-8"))
    ]


def main() -> None:
    root, folder = (pathlib.Path(argument) for argument in sys.argv[1:3])
    for block in all_blocks(root):
        file = folder / block.file
        if block.language in ("cpp", "cmake", "json"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")


if __name__ == "__main__":
    main()
