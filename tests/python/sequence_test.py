"""zeroth.parallel's sequence parallelism: a sequence that is split over ranks gives the numbers of one rank."""

from __future__ import annotations

import unittest

import forked
import job
import tier
import torch

from zeroth import parallel
from zeroth.parallel import SequenceMask
from zeroth.parallel.blocks import BlockRule, Part, attend, empty_part, merge

OF_TRANSFORMERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "t5", "bloom")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in OF_TRANSFORMERS),
)


class Attention(job.RankTest):
    def test_three_ranks_give_the_numbers_of_one(self) -> None:
        self.run_well(3, "sequence_rank.py", "few")

    def test_four_ranks_and_a_grid_give_the_numbers_of_one(self) -> None:
        self.run_well(4, "sequence_rank.py", "few")

    @tier.long
    def test_every_case_on_two_to_eight_ranks(self) -> None:
        for ranks in (2, 3, 4, 8):
            with self.subTest(ranks):
                self.run_well(ranks, "sequence_rank.py", "all")


class Models(job.RankTest):
    def test_models_of_transformers_run_unchanged_on_two_ranks(self) -> None:
        self.run_well(2, "sequence_hf_rank.py", "few", "models", "masks", "rest", "refusals", "plans")

    def test_a_model_runs_on_a_grid_of_four_ranks(self) -> None:
        self.run_well(4, "sequence_hf_rank.py", "few", "models")

    @tier.long
    def test_every_way_on_two_and_four_ranks(self) -> None:
        for ranks in (2, 4):
            with self.subTest(ranks):
                self.run_well(ranks, "sequence_hf_rank.py", "all", "models", "masks", "rest", "refusals")


class WithoutRanks(unittest.TestCase):
    def test_parts_merge_in_any_order(self) -> None:
        # The double bound is the proof; in float32 processors round products differently, by 1.2e-6 at the most seen.
        for dtype, exact, alike in ((torch.float64, 1e-12, 1e-12), (torch.float32, 3e-6, 1e-6)):
            with self.subTest(dtype=dtype):
                self.merge_in_any_order(dtype, exact, alike)

    def merge_in_any_order(self, dtype: torch.dtype, exact: float, alike: float) -> None:
        generator = torch.Generator().manual_seed(2)
        q, k, v = ((torch.randn(2, 4, 40, 8, generator=generator) * 3).to(dtype) for _ in range(3))
        rule = BlockRule(scale=0.5, mask=SequenceMask())
        blocks = [range(start, start + 8) for start in range(0, 40, 8)]
        parts = []
        for keys in blocks:
            own = slice(keys.start, keys.stop)
            part = attend(q, k[:, :, own], v[:, :, own], rule, range(100, 140), keys)
            assert part is not None
            parts.append(part)
        expected = (q.double() @ k.double().transpose(2, 3) * 0.5).softmax(-1) @ v.double()
        largest = expected.abs().max().item()
        results = []
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
            total = empty_part(q, 8)
            for number in order:
                merge(total, Part(parts[number].out.clone(), parts[number].lse.clone()))
            results.append(total.out)
            self.assertLess((total.out - expected).abs().max().item() / largest, exact)
        for other in results[1:]:
            self.assertLess((results[0] - other).abs().max().item() / largest, alike)

    def test_what_sees_nothing_stays_zero(self) -> None:
        q = torch.ones(1, 1, 3, 4)
        total = merge(empty_part(q, 4), empty_part(q, 4))
        self.assertTrue(torch.equal(total.out, torch.zeros(1, 1, 3, 4)))
        self.assertTrue(bool((total.lse == -torch.inf).all()))

    def test_layouts_have_each_token_once(self) -> None:
        for length in (1, 2, 7, 8, 16, 31):
            whole = torch.arange(length)
            for ranks in (1, 2, 3, 4):
                grid = parallel.on_grid(parallel.zigzag(length, ranks), 3)
                for layout in (parallel.contiguous(length, ranks), parallel.zigzag(length, ranks), grid):
                    parts = torch.cat([layout.cut(whole, 0, rank) for rank in range(len(layout.chunks))])
                    self.assertEqual(parts.sort().values.tolist(), whole.tolist())
                    self.assertEqual(layout.join(parts, 0).tolist(), whole.tolist())
                    self.assertLessEqual(max(layout.lengths) - min(layout.lengths), 2)

    def test_a_zigzag_is_as_much_work_on_each_rank(self) -> None:
        def work(layout: parallel.SequenceLayout) -> list[int]:
            return [sum(position + 1 for chunk in chunks for position in chunk) for chunks in layout.chunks]

        self.assertEqual(len(set(work(parallel.zigzag(64, 4)))), 1)
        self.assertGreater(max(work(parallel.contiguous(64, 4))), 6 * min(work(parallel.contiguous(64, 4))))

    def test_heads_are_cut_as_equally_as_can_be(self) -> None:
        heads = parallel.split_heads(7, 7, 3)
        self.assertEqual(heads.q_counts(), [3, 2, 2])
        self.assertEqual(heads.kv_order(), list(range(7)))
        heads = parallel.split_heads(6, 2, 4)  # query heads 0 1 | 2 3 | 4 | 5, three for each key head
        self.assertEqual((heads.q_counts(), heads.kv_order()), ([2, 2, 1, 1], [0, 0, 1, 1, 1]))
        self.assertEqual((heads.kv_of_q(1), heads.is_grouped(1), heads.is_grouped(0)), ([0, 1], True, True))
        self.assertFalse(parallel.split_heads(10, 5, 2).is_grouped(0))

    def test_documents_begin_where_positions_start_again(self) -> None:
        positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
        documents = parallel.documents_of(positions)
        assert documents is not None
        self.assertEqual(documents.tolist(), [[0, 0, 0, 1, 1, 2], [0] * 6])
        self.assertIsNone(parallel.documents_of(positions[1:]))
        bounds = parallel.documents_of_boundaries(torch.tensor([0, 3, 5, 6]), 6)
        self.assertEqual(bounds.tolist(), [[0, 0, 0, 1, 1, 2]])


if __name__ == "__main__":
    tier.main()
