"""The rank program of benchmarks/links runs on two hosts of namespaces: bytes at the cable are those of the formulas,
and the token bucket holds them back. No speed is asserted."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import unittest
from typing import Any

import hosts

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / folder) for folder in ("links", "support")]

import to_loss  # noqa: E402
import two_hosts  # noqa: E402

NUMBERS = {"steps": 8, "block": 2, "layers": 2, "width": 128, "batch": 2, "length": 16}
NUMBERS |= {"freeze": 4, "warmup": 2, "window": 6}


class Links(unittest.TestCase):
    def setUp(self) -> None:
        places: dict[str, Any] = {"build": pathlib.Path(os.environ["ZEROTH_BUILD"]), "python": sys.executable}
        self.job = to_loss.Job(argparse.Namespace(**places, **NUMBERS))

    def test_bytes_at_the_cable_are_those_of_the_formulas(self) -> None:
        runs = {name: self.job.run(1e-3, "--train", name) for name in ("AdamW", "OneBitAdam", "DDP")}
        for step in range(NUMBERS["freeze"]):
            losses = [runs[name][step]["loss"] for name in runs]
            self.assertEqual(losses[0], losses[1])
            self.assertAlmostEqual(losses[0], losses[2], places=4)
        for name in ("AdamW", "OneBitAdam"):
            for row in runs[name]:
                self.assertEqual(row["counted"], row["planned"])
            planned, received = (sum(row[field] for row in runs[name]) for field in ("planned", "received"))
            self.assertLess(planned, received)
            self.assertLess(received, 1.5 * planned, "headers, and what the control plane says")
        self.assertLess(20 * runs["OneBitAdam"][-1]["counted"], runs["AdamW"][-1]["counted"])

    def test_a_token_bucket_holds_steps_back(self) -> None:
        counted = self.job.run(1e-3, "--train", "AdamW")[-1]["counted"]
        gbit = 0.1
        found = self.job.run(1e-3, "--time", "AdamW", "Streaming DiLoCo", "--gbit", f"{gbit}", "--windows")
        (block,) = found["blocks"]["0.1"]["AdamW"]
        through = NUMBERS["block"] * counted - 2 * two_hosts.BURST_BYTES
        self.assertGreater(through, 0)
        self.assertGreater(NUMBERS["block"] * block["seconds"], through / (gbit * 125e6))
        self.assertEqual(len(found["blocks"]["0.1"]["Streaming DiLoCo"]), 1)


if __name__ == "__main__":
    reason = hosts.why_not()
    if reason:
        print(f"SKIPPED: {reason}")
        sys.exit(77)
    unittest.main(verbosity=2)
