"""zeroth.parallelize(): models of transformers, split over tp and sp, give the numbers of one process."""

from __future__ import annotations

import pathlib
import tempfile
import unittest
from collections.abc import Callable

import foreign_attentions
import forked
import job
import low_rank_adapters
import tier
import torch
import transformers
from tensor_families_rank import FAMILIES
from torch import nn

import zeroth
from zeroth.parallel import find_plan, verify_choice

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TRANSFORMERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "t5", "bert")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in OF_TRANSFORMERS),
)


def roles_of(build: Callable[[], nn.Module], ranks: int = 2) -> dict[str, str]:
    """Of the first block, by the last part of the names."""
    with torch.device("meta"):
        plan = find_plan(build(), ranks)
    return {share.name.rpartition(".")[2]: share.role for share in plan.shares if ".1." not in share.name}


class Plans(unittest.TestCase):
    """What "auto" finds, without ranks."""

    def test_queries_keys_and_values_in_one_matrix(self) -> None:
        config = transformers.GPTNeoXConfig(**SMALL, intermediate_size=56)
        roles = roles_of(lambda: transformers.GPTNeoXForCausalLM(config))
        self.assertEqual((roles["query_key_value"], roles["dense"]), ("column", "row"))
        # Fewer heads of keys and values than of queries: no equal blocks.
        config = transformers.Phi3Config(**SMALL, intermediate_size=56, num_key_value_heads=2, pad_token_id=0)
        roles = roles_of(lambda: transformers.Phi3ForCausalLM(config))
        self.assertEqual((roles["qkv_proj"], roles["o_proj"]), ("whole", "whole"))
        self.assertEqual((roles["gate_up_proj"], roles["down_proj"]), ("column", "row"))

    def test_a_value_a_head_and_biases_of_all_heads(self) -> None:
        config = transformers.GptOssConfig(**SMALL, intermediate_size=56, num_key_value_heads=2, head_dim=8)
        roles = roles_of(lambda: transformers.GptOssForCausalLM(config))
        self.assertEqual((roles["sinks"], roles["o_proj"]), ("heads", "row"))
        config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
        roles = roles_of(lambda: transformers.BloomForCausalLM(config))
        self.assertEqual((roles["query_key_value"], roles["dense_4h_to_h"]), ("whole", "row"))

    def test_layers_that_need_all_channels_are_left_whole_or_refused(self) -> None:
        config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
        with self.assertRaisesRegex(zeroth.Error, "the plan shares no layer.*x_proj takes the outputs of a column"):
            roles_of(lambda: transformers.MambaForCausalLM(config))
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=56))
        zeroth.tile(model, larger_than=1000)
        with self.assertRaisesRegex(zeroth.Error, "got: layers in tiles; hint: leave zeroth.tile.. out"):
            find_plan(model, 2)

    def test_a_module_is_corrected_by_any_of_its_names(self) -> None:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=56))
        model.table = model.get_input_embeddings()
        names = [name for name, one in model.named_modules(remove_duplicate=False) if one is model.table]
        roles = {share.name: share.role for share in find_plan(model, 2).shares}
        self.assertGreater(len(names), 1)
        self.assertEqual({roles[name] for name in names}, {"vocab"})
        for name in names:
            roles = {share.name: share.role for share in find_plan(model, 2, {name: "whole"}).shares}
            self.assertEqual({roles[other] for other in names}, {"whole"}, name)

    def test_why_an_attention_of_another_name_stays_whole(self) -> None:
        class Mixer(foreign_attentions.Attention):
            pass

        class OtherAttention(foreign_attentions.Attention):
            def __init__(self) -> None:
                super().__init__()
                self.h = self.num_heads
                del self.num_heads

        for kind, why in (
            (Mixer, "no layer takes its outputs back, nor has Mixer a name with attention or attn in it"),
            (OtherAttention, "it has no number of heads by a name of num_attention_heads, num_heads, n_heads, n_head"),
        ):
            plan = find_plan(foreign_attentions.Net(kind), 2)
            shares = {share.name: share for share in plan.shares}
            self.assertEqual(shares["blocks.0.attn.qkv"].role, "whole")
            self.assertIn(why, shares["blocks.0.attn.qkv"].why)
            self.assertIn(why, plan.text(2))

    def test_tables_that_a_forward_reads_are_whole(self) -> None:
        class Reads(foreign_attentions.Net):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(12, foreign_attentions.SIZE)

            def get_input_embeddings(self) -> nn.Module:
                return self.table

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(super().forward(self.table(tokens)), self.table.weight)

        class Calls(Reads):
            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return foreign_attentions.Net.forward(self, self.table(tokens))

        for kind, role in ((Reads, "whole"), (Calls, "vocab")):
            shares = {share.name: share for share in find_plan(kind(), 2).shares}
            self.assertEqual(shares["table"].role, role)
        self.assertIn("Reads reads weights", find_plan(Reads(), 2).text(2))

    def test_families_that_are_not_verified_are_those_of_the_tests(self) -> None:
        names = {getattr(transformers, f"{name}Config").__module__.split(".")[2] for name in FAMILIES}
        self.assertEqual(names | {*OF_TRANSFORMERS}, verify_choice.OF_TENSORS)

    def test_an_adapter_has_the_role_of_its_layer(self) -> None:
        low_rank_adapters.plans()
        low_rank_adapters.tied_heads()


class Models(job.RankTest):
    def test_four_ranks_give_the_numbers_of_one(self) -> None:
        self.run_well(4, "tensor_rank.py", "few")

    @tier.long
    def test_every_model_on_four_ranks(self) -> None:
        self.run_well(4, "tensor_rank.py", "tp", "sp", "both")

    @tier.long
    def test_every_family_on_two_ranks(self) -> None:
        self.run_well(2, "tensor_families_rank.py")


class Splits(job.RankTest):
    def test_plans_refusals_dropouts_and_bytes(self) -> None:
        self.run_well(4, "tensor_more_rank.py")

    def test_what_a_plan_changes_is_refused_by_name(self) -> None:
        self.run_well(2, "verify_rank.py")
        self.run_well(4, "verify_rank.py", "stages")


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
