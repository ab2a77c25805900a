"""The rank programs of benchmarks/pipeline run, and what they write becomes rows. No speed is asserted."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import tempfile
import unittest

import job

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / folder) for folder in ("pipeline", "support", "peers")]

import pipeline  # noqa: E402
import sleeping  # noqa: E402
from record import Record  # noqa: E402
from setups import STAGES, Work  # noqa: E402

WORK = Work(part="1f1b", layers=2, width=64, tokens=8, micro_batches=2)


class Benchmarks(unittest.TestCase):
    def test_rank_programs_write_what_the_rows_need(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            done = job.run(STAGES, "pipe_benchmarks_rank.py", name, WORK.to_json())
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            turns = json.loads((folder / "blocks.json").read_text(encoding="utf-8"))
            alone = pipeline.read_ranks(folder)
            actions = json.loads((folder / "actions").read_text(encoding="utf-8"))
            (bubble,) = sleeping.measured(folder, 1, STAGES)
        record = Record(benchmark="pipeline/step")
        pipeline.add_turns(record, WORK, turns)
        rows = {row["name"]: row["median"] for row in record.rows}
        self.assertTrue({"ideal: step", "zeroth: step", "zeroth: bubble", "zeroth: step over ideal"} <= rows.keys())
        self.assertTrue(all(math.isfinite(value) for value in rows.values()), rows)
        self.assertGreater(rows["zeroth: step"], 0)
        for report in alone:
            self.assertGreater(report["saved"], 0)
            self.assertGreater(report["construction"], 0)
        self.assertAlmostEqual(alone[0]["loss"], alone[1]["loss"])  # the loss of a pipeline is known to all ranks
        self.assertEqual(actions["actions"], 3 * 4 + 2)  # F, B, a send, a receive; REDUCE, STEP
        self.assertEqual(set(actions["cycles"][0]), {"floor", "zeroth"})
        # (p - 1) / m of the computation, and whatever a busy machine adds.
        self.assertGreater(bubble, 100 * (STAGES - 1) / 4 - 5)


if __name__ == "__main__":
    unittest.main()
