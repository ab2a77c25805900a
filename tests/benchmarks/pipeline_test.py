#!/usr/bin/env python3
"""docs/performance.md shows the committed results of pipelines; ideal times are those of the formulas. Plain Python
3."""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("benchmarks", "benchmarks/support", "benchmarks/pipeline"):
    sys.path.insert(0, str(ROOT / folder))

import compare  # noqa: E402
import ideal  # noqa: E402
import table  # noqa: E402
from record import Record  # noqa: E402
from setups import PARTS, STAGES, Work  # noqa: E402


def one_f_one_b(stages: int, micro_batches: int) -> str:
    """The text of 1F1B, from its definition: a stage has stages - rank micro-batches in flight."""
    lines = [f"zeroth-program 1 schedule=1f1b ranks={stages} micro_batches={micro_batches}"]
    for rank in range(stages):
        words: list[str] = []

        def forward(number: int, rank: int = rank, words: list[str] = words) -> None:
            words += [f"{rank}RECV_F{number}"] if rank else []
            words += [f"{rank}F{number}"]
            words += [f"{rank}SEND_F{number}"] if rank + 1 < stages else []

        def backward(number: int, rank: int = rank, words: list[str] = words) -> None:
            words += [f"{rank}RECV_B{number}"] if rank + 1 < stages else []
            words += [f"{rank}B{number}"]
            words += [f"{rank}SEND_B{number}"] if rank else []

        warm = min(stages - rank - 1, micro_batches)
        for number in range(warm):
            forward(number)
        for number in range(warm, micro_batches):
            forward(number)
            backward(number - warm)
        for number in range(micro_batches - warm, micro_batches):
            backward(number)
        lines.append(f"{rank}: {' '.join(words)} {rank}REDUCE STEP")
    return "\n".join(lines) + "\n"


class Ideal(unittest.TestCase):
    def test_1f1b_waits_for_p_minus_1_micro_batches(self) -> None:
        for stages, micro_batches in itertools.product((2, 3, 4), (4, 5, 8)):
            chunks = {f"{chunk}{kind}": seconds for chunk in range(stages) for kind, seconds in (("F", 1), ("B", 2))}
            program = one_f_one_b(stages, micro_batches)
            step = ideal.step_seconds(program, chunks, [0.5] * stages)
            self.assertAlmostEqual(step, 3 * (micro_batches + stages - 1) + 0.5)
            self.assertEqual(ideal.held(program), [stages - rank for rank in range(stages)])

    def test_the_slower_stage_decides(self) -> None:
        seconds = {"0F": 1.0, "0B": 2.0, "1F": 3.0, "1B": 4.0}
        step = ideal.step_seconds(one_f_one_b(2, 6), seconds, [1.0, 2.0])
        self.assertAlmostEqual(step, 1.0 + 6 * 7.0 + 2.0 + 2.0)

    def test_i_and_w_are_halves_of_b(self) -> None:
        program = "zeroth-program 1\n0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0\n1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0\n"
        self.assertEqual(ideal.ends(program, {"0F": 1, "0B": 2, "1F": 1, "1B": 4}), [6.0, 6.0])
        self.assertEqual(ideal.held(program), [1, 1])

    def test_ranks_that_wait_for_each_other_are_refused(self) -> None:
        with self.assertRaises(ValueError):
            ideal.ends("zeroth-program 1\n0: 0RECV_B0 0F0 0SEND_F0\n1: 1RECV_F0 1B0 1SEND_B0\n", {"0F": 1, "1B": 1})
        with self.assertRaises(ValueError):
            ideal.parse("zeroth-program 1\n0: 0F0 what-is-this\n")


class Setups(unittest.TestCase):
    def test_chunks_have_the_same_blocks_and_travel_as_json(self) -> None:
        for part in PARTS:
            work = Work(part=part)
            self.assertEqual(Work.from_json(work.to_json()), work)
            bounds = work.bounds
            self.assertEqual((bounds[0], bounds[-1]), (0, work.layers + 2))
            self.assertEqual(len(bounds) - 1, STAGES * work.setup.chunks)
            blocks = [end - begin for begin, end in itertools.pairwise(bounds)]
            blocks[0] -= 1
            blocks[-1] -= 1
            self.assertEqual(len(set(blocks)), 1)
        with self.assertRaises(ValueError):
            _ = Work(part="interleaved", layers=6).bounds


class Tables(unittest.TestCase):
    def test_the_page_shows_the_committed_results(self) -> None:
        text = table.PAGE.read_text(encoding="utf-8")
        self.assertEqual(
            text,
            table.page_with(text, ROOT / "benchmarks/results"),
            "benchmarks/pipeline/table.py --page writes it anew",
        )

    def test_a_busy_machine_is_told_and_failures_are(self) -> None:
        record = Record(benchmark="pipeline/step", load_before=3.0)
        record.settings = {"schedule": "1f1b", "stages": 2, "chunks": 1, "micro_batches": 8, "tokens": 256}
        record.settings |= {"parameters": 25_000_000, "cycles": 3}
        record.add("zeroth: step", "ms", [10.0, 20.0, 30.0], "lower")
        record.failures["deepspeed, alone"] = "exit code 1"
        made = record.to_dict()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "pipeline-1f1b.json")
            path.write_text(json.dumps(made), encoding="utf-8")
            self.assertEqual(compare.load(str(path))[1], [])
            text = table.tables(pathlib.Path(folder))
        self.assertIn("**busy machine** (load 3.0", " ".join(text.split()))
        self.assertIn("| **Zeroth**, ZeRO-1 | 20.0 [10.0, 30.0] |", text)
        self.assertIn("- deepspeed, alone: failed: exit code 1", text)
        self.assertIn("Not measured yet: `benchmarks/run.py --only pipeline-gpipe`", text)
        made["machine"]["load_before"] = 0.2
        self.assertNotIn("busy", table.steps(made))


if __name__ == "__main__":
    unittest.main()
