"""Batches of sequences of all lengths: how they are cut, and which ranks compute which."""

from __future__ import annotations

import random
import time
import unittest
from collections.abc import Callable
from typing import Any

import job
import tier
import torch

import zeroth
from zeroth.parallel import (
    SequenceCost,
    cut_batch,
    group_sizes,
    pack_sequences,
    part_sizes,
    plan_batch,
    sequence_indices,
    sequence_sizes,
    whole_batch,
)

COST = SequenceCost(linear=1, attention=0.01, exchange=0.3, fixed=2)


def least_time(lengths: list[int], ranks: int, cost: Any, memory_tokens: int, below: float) -> float:
    """By trying every group for every sequence, as long as it stays below a time."""
    groups = [(size, begin) for size in group_sizes(ranks) for begin in range(0, ranks, size)]
    least = below
    lengths = sorted(lengths, reverse=True)

    def place(number: int, loads: list[float]) -> None:
        nonlocal least
        if max(loads) >= least:
            return
        if number == len(lengths):
            least = max(loads)
            return
        for size, begin in groups:
            if -(-lengths[number] // size) <= memory_tokens:
                after = list(loads)
                for rank in range(begin, begin + size):
                    after[rank] += cost(lengths[number], size)
                place(number + 1, after)

    place(0, [0.0] * ranks)
    return least


class Refusals(unittest.TestCase):
    def refused(self, text: str, call: Callable[[], object]) -> None:
        with self.assertRaisesRegex(zeroth.Error, text):
            call()


class Plans(Refusals):
    def check(self, plan: Any, lengths: list[int], ranks: int, cost: Any, memory_tokens: int) -> None:
        """What holds for every plan."""
        loads = [0.0] * ranks
        for work in plan.works:
            self.assertEqual(work.begin % work.size, 0)
            self.assertIn(work.size, group_sizes(ranks))
            self.assertLessEqual(work.begin + work.size, ranks)
            self.assertEqual(work.tokens, sum(lengths[number] for number in work.sequences))
            self.assertLessEqual(sum(-(-lengths[number] // work.size) for number in work.sequences), memory_tokens)
            for rank in work.ranks:
                loads[rank] += sum(cost(lengths[number], work.size) for number in work.sequences)
        self.assertEqual(sorted(number for work in plan.works for number in work.sequences), list(range(len(lengths))))
        for one, other in zip(loads, plan.loads, strict=True):
            self.assertAlmostEqual(one, other, delta=1e-9 * max(loads, default=1))
        self.assertGreaterEqual(plan.makespan, plan.bound * (1 - 1e-12))
        for work in plan.works:  # a tie goes to fewer ranks
            for number in work.sequences if work.size > 1 else ():
                without = [
                    load - cost(lengths[number], work.size) * (at in work.ranks) for at, load in enumerate(loads)
                ]
                for size in group_sizes(ranks):
                    if size < work.size and -(-lengths[number] // size) <= memory_tokens:
                        least = min(max(without[first : first + size]) for first in range(0, ranks, size))
                        self.assertGreater(least + cost(lengths[number], size), plan.makespan * (1 - 1e-12))
        places = {}
        for rank in range(ranks):  # ranks that share a row come to it after as many others
            for place, work in enumerate(plan.of_rank(rank)):
                self.assertEqual(places.setdefault(work, place), place)

    def draw(self, seed: int, most: int, ranks: tuple[int, ...]) -> tuple[list[int], int, SequenceCost, int]:
        draw = random.Random(seed)
        count = draw.choice(ranks)
        lengths = [1 + int(draw.lognormvariate(4, 1.2)) for _ in range(draw.randint(1, most))]
        cost = SequenceCost(
            linear=draw.random(), attention=draw.random() / 50, exchange=draw.random(), meeting=draw.choice([0, 50])
        )
        memory_tokens = max(-(-max(lengths) // count), draw.randint(20, 400))
        return lengths, count, cost, memory_tokens

    def compare(self, seeds: range, most: int, ranks: tuple[int, ...]) -> None:
        for seed in seeds:
            lengths, count, cost, memory_tokens = self.draw(seed, most, ranks)
            with self.subTest(seed=seed, lengths=lengths, ranks=count, memory_tokens=memory_tokens):
                plan = plan_batch(lengths, count, cost, memory_tokens=memory_tokens)
                self.check(plan, lengths, count, cost, memory_tokens)
                self.assertTrue(plan.is_optimal)
                expected = least_time(lengths, count, cost, memory_tokens, plan.makespan * (1 + 1e-9))
                self.assertAlmostEqual(plan.makespan, expected, delta=1e-9 * expected)
                greedy = plan_batch(lengths, count, cost, memory_tokens=memory_tokens, exact_up_to=0)
                self.check(greedy, lengths, count, cost, memory_tokens)
                self.assertLessEqual(greedy.makespan, 1.25 * expected)

    def test_few_sequences_take_the_least_time_that_there_is(self) -> None:
        self.compare(range(60), 6, (1, 2, 3, 4, 6))

    @tier.long
    def test_eight_sequences_take_the_least_time_that_there_is(self) -> None:
        self.compare(range(100, 400), 8, (2, 4, 8))

    def test_many_sequences(self) -> None:
        draw = random.Random(3)
        for ranks, count in ((4, 32), (8, 64), (12, 90), (64, 256)):
            lengths = [1 + int(draw.lognormvariate(6, 1.5)) for _ in range(count)]
            memory_tokens = max(8192, -(-max(lengths) // ranks))
            began = time.process_time()
            plan = plan_batch(lengths, ranks, COST, memory_tokens=memory_tokens)
            self.assertLess(time.process_time() - began, 1.0)  # some 50 ms for the largest
            self.check(plan, lengths, ranks, COST, memory_tokens)
            self.assertEqual(plan, plan_batch(lengths, ranks, COST, memory_tokens=memory_tokens))
            self.assertLess(plan.makespan, 1.01 * plan.bound)

    def test_rows(self) -> None:
        lengths = [5, 5, 5, 5]
        self.assertEqual([len(work.sequences) for work in plan_batch(lengths, 1, COST).works], [1, 1, 1, 1])
        self.assertEqual([len(work.sequences) for work in plan_batch(lengths, 1, COST, memory_tokens=10).works], [2, 2])
        self.assertEqual(len(plan_batch(lengths, 1, COST, memory_tokens=10, pack=False).works), 4)
        self.assertEqual(plan_batch([], 4, COST).works, ())

    def test_short_sequences_are_not_shared(self) -> None:
        """As many as there are ranks, or more, and none that is longer than all others together."""
        cost, draw = SequenceCost(), random.Random(8)
        self.assertGreater(cost(40, 2), cost(40, 1))  # what ranks share costs something by default
        for ranks in (2, 4, 8):
            lengths = [draw.randint(20, 60) for _ in range(8 * ranks)]
            plan = plan_batch(lengths, ranks, cost)
            self.assertEqual({work.size for work in plan.works}, {1}, str(plan))
            self.check(plan, lengths, ranks, cost, max(lengths))
        self.assertAlmostEqual(SequenceCost(linear=1e-6)(640, 2), 1e-6 * (320 + 64), delta=1e-12)  # in whatever unit
        plan = plan_batch([10, 10, 10, 10], 4, SequenceCost(meeting=0))
        self.assertEqual([work.size for work in plan.works], [1] * 4)

    def test_what_is_refused(self) -> None:
        self.refused(
            "longer than the memory.*sequence 1.*40 tokens", lambda: plan_batch([3, 41], 4, COST, memory_tokens=10)
        )
        self.refused("no tokens.*sequence 1", lambda: plan_batch([3, 0], 4, COST))
        self.refused("no ranks", lambda: plan_batch([3], 0, COST))
        self.refused(r"no time.*cost\(3, 1\).*nan", lambda: plan_batch([3], 4, lambda length, size: float("nan")))

    def test_the_cost_of_a_decoder(self) -> None:
        cost = SequenceCost.of_decoder(
            hidden=64, layers=2, intermediate=128, flops_per_s=1e9, bytes_per_s=1e9, call_s=0
        )
        forward = 2 * 100 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 100 * 100 * 64  # a layer, half of the pairs
        self.assertAlmostEqual(cost(100, 1), 3 * 2 * forward / 1e9)
        moved = 4 * 100 * 64 / 4 * 3 / 4 * 2  # Ulysses: 4 s h / P (P - 1) / P elements of 2 bytes
        self.assertAlmostEqual(cost(100, 4), cost(100, 1) / 4 + 2 * 2 * moved / 1e9)


class Cuts(Refusals):
    def test_every_position_is_on_one_rank(self) -> None:
        for length in (0, 1, 7, 16, 33):
            for ranks in (1, 2, 3, 4):
                self.assertEqual(sum(part_sizes(length, ranks)), length)
                for layout in ("contiguous", "zigzag"):
                    parts = [sequence_indices(length, ranks, rank, layout) for rank in range(ranks)]  # type: ignore[arg-type]
                    self.assertEqual(sorted(torch.cat(parts).tolist()), list(range(length)))
                    self.assertEqual([len(one) for one in parts], sequence_sizes(length, ranks, layout))  # type: ignore[arg-type]
        self.refused("no such layout", lambda: sequence_indices(4, 2, 0, "striped"))  # type: ignore[arg-type]
        self.refused("no such part.*0 to 1", lambda: sequence_indices(4, 2, 2))

    def test_labels_are_shifted_within_documents_before_the_cut(self) -> None:
        row = pack_sequences([{"input_ids": torch.arange(10, 13)}, {"input_ids": torch.arange(20, 22)}])
        whole = whole_batch(row | {"labels": row["input_ids"]}, multiple=4, pad_id=9)
        self.assertEqual(whole["input_ids"].tolist(), [[10, 11, 12, 20, 21, 9, 9, 9]])
        self.assertEqual(whole["position_ids"].tolist(), [[0, 1, 2, 0, 1, 0, 1, 2]])
        self.assertEqual(whole["labels"].tolist(), [[11, 12, -100, 21, -100, -100, -100, -100]])
        part = cut_batch(whole, 2, 1, "zigzag")
        self.assertEqual(part["input_ids"].tolist(), [[12, 20, 21, 9]])
        self.assertIs(part["labels"], part["shift_labels"])
        single = whole_batch({"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, multiple=5)
        self.assertEqual(single["position_ids"].tolist(), [[0, 1, 2, 3, 4]])

    def test_padding_has_no_label_and_other_values_go_along(self) -> None:
        ids = torch.arange(1, 9).view(2, 4)
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
        batch = {"input_ids": ids, "labels": ids, "attention_mask": mask, "extra": ids.double(), "name": "x"}
        whole = whole_batch(batch | {"cu_seq_lens_q": torch.tensor([0, 4])}, multiple=6)
        self.assertEqual(whole["labels"].tolist(), [[2, 3, 4, -100, -100, -100], [6, -100, -100, -100, -100, -100]])
        self.assertEqual((whole["extra"].shape, whole["name"]), ((2, 6), "x"))
        self.assertEqual(whole["cu_seq_lens_q"].tolist(), [0, 4, 6])
        self.assertNotIn("attention_mask", whole)
        self.assertEqual(cut_batch(whole, 3, 2)["extra"].tolist(), [[0.0, 0.0]] * 2)
        self.refused("padding before tokens", lambda: whole_batch(batch | {"attention_mask": 1 - mask}))
        self.refused("mask of pairs", lambda: whole_batch(batch | {"attention_mask": mask[:, None, None]}))
        self.refused("labels are not one a token", lambda: whole_batch(batch | {"shift_labels": ids[:, 1:]}))
        self.refused("positions are not one", lambda: whole_batch(batch | {"position_ids": ids[:, 1:]}))
        self.refused("no sequences to cut", lambda: whole_batch({"labels": ids}))
        self.refused("cannot be padded", lambda: whole_batch(batch, multiple=0))


class OnFourRanks(job.RankTest):
    def test_cut_and_planned_batches_have_the_gradient_of_one_process(self) -> None:
        self.assertEqual(self.run_well(4, "lengths_rank.py").count("lengths: ok"), 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tier.main()
