"""Cuts suites into N parts of about the same declared cost, the same on every machine.

Suites that declare more than a part's share are cut into shards of GoogleTest; the pieces go, the dearest first, to the
part that has least so far.
"""

from __future__ import annotations

import dataclasses

from testing.schedule import Piece
from testing.suites import Suite


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The `index`-th of `count` parts, from 0 on."""

    index: int
    count: int

    @staticmethod
    def parse(text: str) -> Part:
        """ "3/20". Throws ValueError."""
        index, count = (int(word) for word in text.split("/"))
        if not 0 <= index < count:
            raise ValueError(f"part {text}: from 0/{count} to {count - 1}/{count}")
        return Part(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, suites: list[Suite]) -> list[Piece]:
        share = max(1.0, sum(suite.cost for suite in suites) / self.count)
        pieces = []
        for suite in suites:
            shards = max(1, round(suite.cost / share)) if suite.result_file else 1
            pieces += [Piece(suite=suite, shard=shard, shards=shards) for shard in range(shards)]
        parts: list[list[Piece]] = [[] for _ in range(self.count)]
        sums = [0.0] * self.count
        for piece in sorted(pieces, key=lambda piece: (-piece.cost, piece.name)):
            least = sums.index(min(sums))
            parts[least].append(piece)
            sums[least] += piece.cost
        return parts[self.index]
