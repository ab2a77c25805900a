"""zeroth.parallelize(): models of transformers, split over tp and sp, give the numbers of one process."""

from __future__ import annotations

import pathlib
import tempfile

import forked
import job
import tier

OF_TRANSFORMERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "t5", "bert")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in OF_TRANSFORMERS),
)


class Models(job.RankTest):
    def test_four_ranks_give_the_numbers_of_one(self) -> None:
        self.run_well(4, "tensor_rank.py", "few")

    @tier.long
    def test_every_model_on_four_ranks(self) -> None:
        self.run_well(4, "tensor_rank.py", "tp", "sp", "both")


class Splits(job.RankTest):
    def test_plans_refusals_dropouts_and_bytes(self) -> None:
        self.run_well(4, "tensor_more_rank.py")


class States(job.RankTest):
    def setUp(self) -> None:
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_a_checkpoint_of_dp_2_tp_2_is_loaded_by_other_meshes(self) -> None:
        self.run_well(4, "tensor_state_rank.py", "save", str(self.folder), "llama")
        for ranks, mesh in ((4, ("tp=4", "sp=1", "stage=1")), (3, ("tp=1", "sp=1", "stage=2"))):
            with self.subTest(ranks):
                self.run_well(ranks, "tensor_state_rank.py", "load", str(self.folder), "model=llama", *mesh)

    @tier.long
    def test_every_mesh_loads_every_model(self) -> None:
        self.run_well(4, "tensor_state_rank.py", "save", str(self.folder), "llama", "gpt2")
        for model in ("llama", "gpt2"):
            for tp, sp in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
                with self.subTest(model=model, tp=tp, sp=sp):
                    mesh = (f"tp={tp}", f"sp={sp}", f"stage={(tp + sp) % 4}")
                    self.run_well(4, "tensor_state_rank.py", "load", str(self.folder), f"model={model}", *mesh)


if __name__ == "__main__":
    tier.main()
