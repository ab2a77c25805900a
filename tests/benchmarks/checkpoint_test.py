#!/usr/bin/env python3
"""docs/checkpoints.md shows the committed results. Plain Python 3."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/checkpoint"))

import table  # noqa: E402


class Table(unittest.TestCase):
    def test_the_page_shows_the_committed_results(self) -> None:
        text = table.PAGE.read_text(encoding="utf-8")
        self.assertEqual(
            text,
            table.page_with(text, ROOT / "benchmarks/results"),
            "benchmarks/checkpoint/table.py --page writes it anew",
        )

    def test_a_line_has_times_and_limits(self) -> None:
        rows = [{"name": "zeroth: save", "median": 0.25}, {"name": "limit: write", "median": 0.2}]
        result = {
            "settings": {"state_MB": 382.2, "ranks": 2},
            "machine": {"load_before": 1.0, "load_after": 2.0},
            "rows": rows,
        }
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, f"{table.NAMES[1]}.json").write_text(json.dumps(result), encoding="utf-8")
            self.assertIn("| 382 MB, 2 ranks | 0.25 / 0.20 |", table.table(pathlib.Path(folder)))


if __name__ == "__main__":
    unittest.main()
