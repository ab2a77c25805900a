"""Tensor and sequence parallelism with the rest: norms on slices, grids, groups of shards, half precision, faults."""

from __future__ import annotations

import forked
import job
import tier

OF_TRANSFORMERS = ("llama", "qwen3", "gemma", "gpt2", "t5", "bert")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in OF_TRANSFORMERS),
)


class Mixes(job.RankTest):
    def test_norms_on_slices(self) -> None:
        self.run_well(2, "tensor_norms_rank.py")

    def test_faults_are_named(self) -> None:
        self.run_well(4, "tensor_faults_rank.py")

    def test_four_ranks_give_the_numbers_of_one(self) -> None:
        self.run_well(4, "tensor_rank.py", "few mixes")

    @tier.long
    def test_scales_of_float16(self) -> None:
        self.run_well(4, "tensor_half_rank.py")

    @tier.long
    def test_every_mix_on_four_ranks(self) -> None:
        self.run_well(4, "tensor_rank.py", "norms", "ring", "half", "mixes")

    @tier.long
    def test_norms_of_thirty_families(self) -> None:
        self.run_well(2, "norm_families_rank.py")

    @tier.long
    def test_eight_ranks(self) -> None:
        self.run_well(8, "tensor_rank.py", "eight")


if __name__ == "__main__":
    tier.main()
