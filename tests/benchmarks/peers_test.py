#!/usr/bin/env python3
"""Committed results fit the schema, docs/peers.md shows them, tables say what was measured and what failed. Plain
Python 3."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import unittest
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "benchmarks/support", "benchmarks/peers"):
    sys.path.insert(0, str(ROOT / folder))

import compare  # noqa: E402
import limits  # noqa: E402
import ranks  # noqa: E402
import table  # noqa: E402
from cells import BARE, CELLS, ENTRIES, Cell  # noqa: E402
from measure import Measurement, Solo, plan_jobs  # noqa: E402
from places import Places  # noqa: E402
from record import Record, text_of  # noqa: E402
from rows import add_rows  # noqa: E402

ENTRY = {entry.name: entry for entry in ENTRIES}
PLACES = Places(build=ROOT, python=pathlib.Path("python3"), operator_seconds=0.0)


def block(seconds: float) -> dict[str, float]:
    return {"wall": seconds, "cpu": 2 * seconds, "forward": seconds / 4, "backward": seconds / 2, "update": seconds / 4}


def result(cell: Cell) -> dict[str, Any]:
    """Of a measurement in which zeroth-0 takes 1.1 times the floor's step and ddp fails."""
    measured = Measurement(cell, [ENTRY[name] for name in ("floor", "ddp", "zeroth-0")], PLACES)
    for name, factor in (("floor", 1.0), ("zeroth-0", 1.1)):
        report = {
            "tracked_after_backward": 32e6,
            "tracked_after_step": 24e6,
            "loss": 5.5,
            "tokens": 512,
            "pss_imported": 0,
        }
        if name == "zeroth-0":
            report["counted"] = 8e6
        measured.solo[name] = Solo(reports=[report, report], peak_pss=2**30)
        measured.pairs[name] = [(block(factor * seconds), block(seconds)) for seconds in (1.0, 2.0, 3.0)]
        measured.startup[name] = [3.0 * factor]
    measured.startup[BARE.name] = [3.0]
    measured.failures["ddp, alone"] = "exit code 1: RuntimeError: no"
    record = Record(benchmark="peers/cell")
    record.settings = {"parameters": 2_000_000, "dtype": cell.dtype, "ranks": 2, "cycles": 3, "solo_steps": 4}
    record.settings |= {
        "contestants": ["floor", "ddp", "zeroth-0"],
        "bytes_by_state": {"zeroth-0": {"buckets": 8_000_000}},
    }
    record.failures = measured.failures
    add_rows(record, measured)
    record.count_foreign()
    return record.to_dict()


class Results(unittest.TestCase):
    def test_committed_results_fit_the_schema(self) -> None:
        for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
            self.assertEqual((path.name, compare.load(str(path))[1]), (path.name, []))

    def test_committed_results_have_a_line_a_row(self) -> None:
        for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
            text = path.read_text(encoding="utf-8")
            result = json.loads(text)
            # Numbers of C++ may be spelled in another way than Python's, never in another place.
            self.assertEqual((path.name, len(text.splitlines())), (path.name, len(text_of(result).splitlines())))
            rows = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith('    {"name": ')]
            self.assertEqual(rows, result["rows"])

    def test_the_page_shows_the_committed_results(self) -> None:
        text = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
        self.assertEqual(
            text, table.of_page(text, table.RESULTS), "benchmarks/peers/table.py --page docs/peers.md writes it anew"
        )

    def test_the_page_shows_every_cell(self) -> None:
        text = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
        for cell in CELLS:
            self.assertIn(f"<!-- steps {cell.name} -->", text)


class Tables(unittest.TestCase):
    def test_a_measurement_fits_the_schema_and_makes_its_table(self) -> None:
        made = result(CELLS[0])
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(made, file)
            file.flush()
            self.assertEqual(compare.load(file.name)[1], [])
        lines = table.steps(made).splitlines()
        self.assertIn("2,000,000 parameters, fp32, 2 ranks, 3 cycles", lines[0])
        floor, ddp, zeroth = [line for line in lines if line.startswith("| ")][2:5]
        self.assertTrue(floor.startswith("| plain torch | 2,000.0 [1,000.0, 3,000.0] |  | 512 "), floor)
        self.assertEqual(set(ddp.split(" | ")[1:-1]), {"failed"})
        for cell in ("1.100 [1.100, 1.100]", "32.0 / 24.0", "1,024", "16.0", "3.30", "0.30"):
            self.assertIn(f"| {cell} |", zeroth)
        self.assertIn("Loss of rank 0 in step 4: 5.500000 (floor, zeroth-0).", lines)
        self.assertIn("- ddp, alone: failed: exit code 1: RuntimeError: no", lines)

    def test_tiny_modules_have_a_column_and_no_tokens(self) -> None:
        text = table.steps(result(next(cell for cell in CELLS if cell.work == "tiny")))
        self.assertIn("us a module", text)
        self.assertIn("400.0 [200.0, 600.0]", text)  # 0.1 of 1, 2, 3 s for 500 modules
        self.assertNotIn("tokens/s", text)

    def test_limits_and_states(self) -> None:
        made = result(CELLS[0])
        line = table.limits_of(made, table.RESULTS).splitlines()[-1]
        self.assertIn("| 200.0 | 50.0 / 100.0 / 50.0 |", line)
        self.assertIn("| 16.0 | 16.0 | 16.00 | 16.00 | 12.00 | 12.00 |", line)
        self.assertIn("| 4.000 |", table.states(made))

    def test_what_a_peer_has_less_of_is_told_of_its_own_stage_only(self) -> None:
        made = result(CELLS[0])
        made["settings"]["contestants"] = ["floor", "ddp", "zeroth-0", "zro"]

        def add(who: str, field: str, median: float, low: float, high: float) -> None:
            made["rows"].append(
                {"name": f"{who}: {field}", "unit": "MB", "median": median, "low": low, "high": high, "samples": 2}
            )

        for who, median in (("ddp", 31.99999), ("zro", 1.0)):
            add(who, "tracked after backward, largest rank", median, median, median)
        add("ddp", "step over floor", 1.09, 1.0, 1.2)
        add("ddp", "start-up", 9.0, 9.0, 9.0)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, f"{CELLS[0].name}.json").write_text(json.dumps(made), encoding="utf-8")
            lines = table.behind(pathlib.Path(folder)).splitlines()[2:]
        self.assertEqual(
            [line.split(" | ", 1)[1] for line in lines],
            [
                "**Zeroth 0** | step over floor, x | 1.100 | DDP 1.090 | yes |",
                "**Zeroth 0** | tracked after backward, largest rank, MB | 32.000000 | DDP 31.999990 |  |",
            ],
        )

    def test_markers_are_filled_and_kept(self) -> None:
        page = "a\n<!-- steps nobody -->\nold\n<!-- end -->\nb\n"
        written = table.of_page(page, table.RESULTS)
        self.assertNotIn("old", written)
        self.assertIn("Not measured yet", written)
        self.assertEqual(table.of_page(written, table.RESULTS), written)


class Plans(unittest.TestCase):
    def test_groups_are_jobs_and_split_where_memory_ends(self) -> None:
        entries = [ENTRY[name] for name in ("floor", "ddp", "zeroth-0", "zro", "zeroth-1")]
        sizes = {entry.name: 10 for entry in entries}
        self.assertEqual(
            list(plan_jobs(entries, sizes, 30)), [["floor", "ddp", "zeroth-0"], ["floor", "zro", "zeroth-1"]]
        )
        alone = [["floor", name] for name in ("ddp", "zeroth-0", "zro", "zeroth-1")]
        self.assertEqual(list(plan_jobs(entries, sizes, 20)), alone)
        self.assertEqual(list(plan_jobs(entries, sizes, 0)), alone, "each is tried, whatever it takes")

    def test_least_bytes(self) -> None:
        stages = [ENTRY[f"zeroth-{stage}"] for stage in range(4)]
        self.assertEqual([limits.held_bytes(entry, "fp32", 2, gradients=True) for entry in stages], [16, 12, 10, 8])
        self.assertEqual([limits.held_bytes(entry, "bf16", 2, gradients=True) for entry in stages], [14, 9, 8, 7])
        wire = [limits.wire_bytes(ENTRY[name], 1000, "fp32", 4) for name in ("ddp", "zeroth-3", "fsdp2-keep")]
        self.assertEqual(wire, [24_000, 36_000, 24_000])

    def test_the_reason_is_the_first_error_that_was_raised(self) -> None:
        log = "step 1\nTraceback:\n[rank1]: ValueError: first in /a/b/c.py\nRuntimeError: then\nzeroth-run: rank 1 exited with 1"  # noqa: E501
        self.assertEqual(ranks.reason(log, 1), "exit code 1: ValueError: first in c.py")
        self.assertEqual(ranks.reason("Killed\n", -9), "exit code -9: Killed")

    def test_cells_travel_as_json(self) -> None:
        for cell in CELLS:
            self.assertEqual(Cell.from_json(cell.to_json()), cell)


if __name__ == "__main__":
    unittest.main()
