#!/usr/bin/env python3
"""docs/slow-links.md shows the committed result; seconds to a loss are those of a method's kinds of steps. Plain Python
3."""

from __future__ import annotations

import pathlib
import sys
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("benchmarks/links", "benchmarks/support"):
    sys.path.insert(0, str(ROOT / folder))

import page  # noqa: E402
import to_loss  # noqa: E402
from record import Record  # noqa: E402


def block(seconds: float, each: list[tuple[float, int]] | None = None) -> list[dict[str, Any]]:
    return [{"seconds": seconds, "cpu": seconds / 2, "each": each or []}]


def row(loss: float, counted: int) -> dict[str, Any]:
    return {"loss": loss, "received": counted + 10, "counted": counted, "planned": counted, "cpu": 0.0}


class Page(unittest.TestCase):
    def test_the_page_shows_the_committed_result(self) -> None:
        text = page.PAGE.read_text(encoding="utf-8")
        written = page.page_with(text, ROOT / "benchmarks/results")
        self.assertEqual(text, written, "benchmarks/links/page.py --page writes it anew")


class Times(unittest.TestCase):
    def test_a_step_takes_as_long_as_its_kind(self) -> None:
        silent, signs = (0.25, 0), (0.5, 30)
        blocks = {"AdamW": block(1.0), "OneBitAdam": block(0.5), "ZeroOneAdam": block(0.4, [silent, silent, signs])}
        times = to_loss.Times(blocks=blocks, freeze=2)
        self.assertEqual(times.steps("OneBitAdam", [row(1.0, 0)] * 3), [1.0, 1.0, 0.5])
        rows = [row(1.0, 1000), row(1.0, 30), row(1.0, 0)]
        self.assertEqual(times.steps("ZeroOneAdam", rows), [1.0, 0.5, 0.25])

    def test_seconds_end_where_the_loss_comes_to_the_target(self) -> None:
        steps = 2 * to_loss.SMOOTH
        falling = [row(2.0, 1000)] * to_loss.SMOOTH + [row(1.0, 1000)] * to_loss.SMOOTH
        slower = [row(2.0, 30)] * steps
        record = Record(benchmark="links/to_loss")
        times = to_loss.Times(blocks={"AdamW": block(1.0), "DiLoCo": block(0.5)}, freeze=0)
        to_loss.add_times(record, {"AdamW": falling, "DiLoCo": slower}, {"1": times})
        found = page.medians(record.to_dict())
        self.assertEqual(found["1 Gbit/s, AdamW: seconds to 5 % above AdamW's last loss"], steps - 1)
        self.assertIn("1 Gbit/s, DiLoCo: seconds to 5 % above AdamW's last loss", record.failures)


if __name__ == "__main__":
    unittest.main()
