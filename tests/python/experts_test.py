"""zeroth.experts(): models of transformers whose experts are on several ranks give the numbers of one process."""

from __future__ import annotations

import tempfile
import unittest

import forked
import job
import tier
import torch
from experts_models import FAMILIES, made

import zeroth

FEW = ("Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss")
MODULES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODULES),
)


class Found(unittest.TestCase):
    """Without ranks."""

    def test_what_a_model_has_is_printed(self) -> None:
        model = made("DeepseekV3")
        before = {name: one.data_ptr() for name, one in model.named_parameters()}
        text = str(zeroth.experts(model))
        at = "model.layers.1.mlp.experts"
        self.assertEqual(
            text, f"experts {at} (DeepseekV3Experts): 4, 4 a rank of ep=1: gate_up_proj, down_proj"
        )  # the first layer is dense, and shared experts are whole
        self.assertEqual(before, {name: one.data_ptr() for name, one in model.named_parameters()})
        found = zeroth.experts(made("GptOss"))
        self.assertEqual(len(found.layers), 2)
        self.assertEqual(found.layers[0].num_experts, 4)
        self.assertIn("gate_up_proj_bias", found.layers[0].parameters)
        self.assertEqual(found.layers[0].shared, ())
        self.assertEqual(found.layers[0].elements, 4 * (16 * 48 + 48 + 24 * 16 + 16))

    def test_modules_that_look_like_experts_are_printed_with_why_they_are_whole(self) -> None:
        block = torch.nn.Module()
        block.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.assertIn("whole   experts: a ModuleList of modules", str(zeroth.experts(block)))
        block.experts = torch.nn.Linear(4, 4)
        self.assertIn("whole   experts: Linear has no num_experts", str(zeroth.experts(block)))
        self.assertEqual(str(zeroth.experts(torch.nn.Linear(4, 4))), "")


class Ranks(job.RankTest):
    def test_four_ranks_give_the_numbers_of_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.run_well(
                4,
                "experts_rank.py",
                "few",
                "few ways",
                "ways_change_between_steps",
                "stages",
                "edges",
                "tokens_of_ranks",
                "gradients_stay_in_their_group",
                "copies",
                "deferred",
                "terms_of_weights",
                "refusals",
                "stages_of_a_pipeline",
                "checkpoints",
                folder,
            )

    def test_families(self) -> None:
        self.run_well(4, "experts_rank.py", "families", *FEW)

    @tier.long
    def test_every_other_family(self) -> None:
        self.run_well(4, "experts_rank.py", "families", *(name for name in FAMILIES if name not in FEW))

    @tier.long
    def test_every_mesh(self) -> None:
        self.run_well(4, "experts_rank.py", "grid", "ways")

    @tier.long
    def test_half_precision(self) -> None:
        self.run_well(4, "experts_rank.py", "half")

    @tier.long
    def test_eight_ranks(self) -> None:
        self.run_well(8, "experts_rank.py", "eight")


if __name__ == "__main__":
    tier.main()
