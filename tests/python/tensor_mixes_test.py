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


class Norms(job.RankTest):
    def test_slices_of_two_ranks(self) -> None:
        self.run_well(2, "tensor_norms_rank.py")

    @tier.long
    def test_every_model_on_four_ranks(self) -> None:
        self.run_well(4, "tensor_rank.py", "norms")


if __name__ == "__main__":
    tier.main()
