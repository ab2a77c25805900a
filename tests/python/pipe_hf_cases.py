"""Models of transformers in parts; for pipe_chain_test.py."""

from __future__ import annotations

import copy
import resource
import unittest
from typing import Any

import tier
import torch
from pipe_parts import alone, require_equal, run_parts
from refusing import refused
from torch import nn

import zeroth
from zeroth import pipe


def tokens(rows: int, length: int, **more: Any) -> dict[str, Any]:
    """A micro-batch with padding on the right."""
    ids = torch.randint(2, 97, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    labels = torch.where(mask == 1, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def decoder(name: str) -> nn.Module:
    """A small model of transformers, without dropout, in float64 where its experts allow it."""
    import tensor_families_rank
    import tensor_models
    import transformers

    torch.manual_seed(1)
    if name in tensor_models.MODELS:
        model = tensor_models.MODELS[name]()
    else:
        kind, options, _ = tensor_families_rank.FAMILIES[name]
        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return (model if "Moe" in name or name in ("Mixtral", "GptOss") else model.double()).train()


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "bert", "OPT", "GPTNeoX", "Bloom", "Falcon", "Phi",
            "Phi3", "StableLm", "Cohere", "Olmo", "Olmo2", "Gemma2", "Gemma3Text", "GPTJ", "Starcoder2", "GPTBigCode",
            "CodeGen", "Mixtral", "Qwen3Moe", "GptOss", "Granite", "SmolLM3", "Mpt", "Glm4", "Nemotron", "Persimmon",
            "BioGpt", "Llama4Text", "Roberta", "DistilBert")  # fmt: skip


class Transformers(unittest.TestCase):
    def require_whole(self, model: nn.Module, batches: list[Any]) -> pipe.Chain:
        chain = pipe.chain_of(model)
        require_equal(chain, lambda batch: model(**batch), batches)
        return chain

    @tier.both
    def test_a_family_in_parts_is_the_whole(self) -> None:
        for name in tier.rows(FAMILIES, ("llama", "qwen2", "gpt2", "Bloom")):
            with self.subTest(name):
                model = decoder(name)
                model.config.use_cache = False  # type: ignore[union-attr]  # some round what they put into it
                self.require_whole(model, [tokens(2, 8), tokens(1, 5)])

    def test_a_tied_head_has_two_layers(self) -> None:
        chain = pipe.chain_of(decoder("gpt2"))
        names = ["embedding", "transformer.h.0", "transformer.h.1", "head"]
        self.assertEqual([layer.name for layer in chain.layers], names)
        self.assertEqual(chain.uses["transformer.wte.weight"], (0, 3))
        self.assertEqual(chain.uses["lm_head.weight"], (0, 3))
        self.assertEqual(chain.uses["transformer.wpe.weight"], (0,))
        self.assertEqual(chain.uses["transformer.h.1.mlp.c_fc.weight"], (2,))
        self.assertEqual(chain.uses["transformer.ln_f.bias"], (3,))
        self.assertEqual(pipe.partition(chain, 3, ["transformer.h.1", "head"]), [0, 2, 3, 4])

    def test_recomputed_blocks_are_the_whole(self) -> None:
        for reentrant in (False, True):
            model = decoder("llama")
            plain = copy.deepcopy(model)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
            batch = tokens(2, 8)
            expected = plain(**batch).loss
            expected.backward()
            chain = pipe.chain_of(model)
            for boundaries in ([0, 2, 4], [0, 1, 2, 3, 4]):
                model.zero_grad()
                [loss] = run_parts(chain, boundaries, [batch])
                self.assertTrue(torch.equal(loss, expected.detach()))
                for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                    self.assertTrue(torch.equal(one.grad, other.grad), name)  # type: ignore[arg-type]

    def test_kernels_dtypes_and_positions_are_those_of_the_model(self) -> None:
        model = decoder("llama").to(torch.bfloat16)
        model.config._attn_implementation = "eager"  # type: ignore[union-attr]
        positions = torch.arange(8)[None] + 3
        chain = self.require_whole(model, [tokens(2, 8, position_ids=positions)])
        with alone(chain, 0, 2):
            self.assertEqual(chain.run(0, 2, None, tokens(1, 4)).dtype, torch.bfloat16)
        self.require_whole(model.float(), [tokens(2, 8)])  # after the look

    def test_evaluation_and_whole_calls_give_the_logits_of_the_model(self) -> None:
        model = decoder("qwen2").eval()
        chain = pipe.chain_of(model)
        batch = tokens(2, 8)
        del batch["labels"]
        with torch.no_grad():
            expected = model(**batch)
            self.assertIsNotNone(expected.past_key_values)
            output = chain.run(2, 4, chain.run(0, 2, None, batch), batch)
            self.assertTrue(torch.equal(output.logits, expected.logits))
            self.assertIsNone(output.past_key_values)
            self.assertTrue(torch.equal(model(**batch).logits, expected.logits))
        self.assertEqual(chain.notes, ("use_cache is off: a pipeline keeps no keys and values of earlier tokens",))

    def test_a_loss_of_the_user_takes_the_output_and_the_batch(self) -> None:
        model = decoder("llama")
        chain = pipe.chain_of(model, loss_fn=lambda output, batch: output.logits.sum() + batch["labels"].sum())
        batch = tokens(1, 4)
        expected = model(**batch).logits.sum() + batch["labels"].sum()
        self.assertTrue(torch.equal(run_parts(chain, [0, 2, 4], [batch])[0], expected.detach()))

    def test_what_needs_all_blocks_is_refused(self) -> None:
        model = decoder("llama")
        chain = pipe.chain_of(model)
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            with refused("USAGE", f"values of its own blocks only.*which: {name}"):
                chain.run(0, 1, None, tokens(1, 4, **{name: True}))
        with refused("USAGE", "keeps no keys and values"):
            chain.run(0, 1, None, tokens(1, 4, use_cache=True))
        model.config.output_hidden_states = True  # type: ignore[union-attr]
        with refused("USAGE", "values of its own blocks only.*which: output_hidden_states"):
            pipe.chain_of(model)
        with refused("MODEL", "more than the output of a block.*which: encoder_hidden_states, from decoder.block.0"):
            pipe.chain_of(decoder("t5"))

    @tier.long
    def test_shared_matrices_and_sequences_in_parts_are_the_whole(self) -> None:
        import job

        done = job.run(2, "pipe_mesh_rank.py")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("mesh: ok"), 2)

    def test_tiles_of_the_loss_stay(self) -> None:
        model = decoder("llama")
        zeroth.parallel.tile_loss(model, tiles=3)
        chain = pipe.chain_of(model)
        require_equal(chain, lambda batch: model(**batch), [tokens(2, 8)])
        self.assertNotIn("logits", chain.run(0, 4, None, tokens(2, 8)))

    def test_a_block_of_a_model_is_measured(self) -> None:
        chain = pipe.chain_of(decoder("llama"))
        found = pipe.measure(chain, tokens(2, 8), "memory")
        self.assertEqual(found[1], found[2])
        self.assertGreater(found[1], 2 * 8 * 32 * 8 * 6)  # hidden states into norms, projections and the MLP
        self.assertEqual(len(pipe.measure(chain, tokens(2, 8), "time", repeats=1)), 4)

    def test_a_look_takes_no_memory(self) -> None:
        import transformers

        with torch.device("meta"):
            llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=6))
            mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=2))
        for model, layers in ((llama, 8), (mixtral, 4)):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.assertEqual(len(pipe.chain_of(model).layers), layers)
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            self.assertLess(taken, sum(one.numel() for one in model.parameters()) * 4 / 20)
