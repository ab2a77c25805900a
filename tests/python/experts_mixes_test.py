"""Experts with the rest: recomputes, files, rows of ranks, small messages, uneven ends, faults, pipelines, adapters."""

from __future__ import annotations

import copy
import tempfile
import unittest

import forked
import job
import tier
import torch
import transformers
from experts_mixes_rank import Block
from experts_models import SMALL, Doubles
from torch import nn

import zeroth
import zeroth.nn

MODULES = ("mixtral", "qwen3_moe", "deepseek_v3", "llama")
forked.preload(
    "transformers",
    "transformers.generation",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODULES),
)


class Mixes(job.RankTest):
    def test_a_recompute_makes_no_calls_between_ranks(self) -> None:
        self.run_well(2, "kept_calls_rank.py", "ep")

    @tier.long
    def test_a_recompute_of_every_axis(self) -> None:
        self.run_well(2, "kept_calls_rank.py", "ep", "tp", "sp")

    def test_experts_beside_the_rest_are_those_of_one_process(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            parts = ("files", "dense_first", "uneven", "stacked", "mixlora", "tasks", "verified")
            self.run_well(4, "experts_mixes_rank.py", *parts, folder)

    @tier.long
    def test_levels_and_small_messages(self) -> None:
        self.run_well(4, "experts_mixes_rank.py", "levels", "small_messages", "")

    def test_a_rank_that_fails_inside_of_experts_ends_all(self) -> None:
        for way, words in (("raises", "planted in an expert"), ("dies", "signal 9|SIGKILL|killed")):
            done = job.run(2, "experts_mixes_rank.py", way, "", limit_s=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, words)
            self.assertNotIn("nothing failed", done.stderr)


class Stacked(unittest.TestCase):
    """A list of experts and its stack, without ranks."""

    def test_values_and_gradients_are_those_of_the_list(self) -> None:
        torch.manual_seed(0)
        listed = Block().double()
        block = copy.deepcopy(listed)
        block.experts = zeroth.nn.stack_experts(block.experts)
        self.assertEqual([name for name, _ in block.experts.named_parameters()],
                         ["0__weight", "0__bias", "2__weight", "2__bias"])  # fmt: skip
        x = torch.randn(7, 8, dtype=torch.float64)
        outs = [listed(x), block(x)]
        torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-12)
        for out in outs:
            out.square().sum().backward()
        gradients = [{name: one.grad for name, one in each.named_parameters()} for each in (listed, block)]
        of_list = zeroth.nn.listed_state(block.experts, gradients[1])
        self.assertEqual(of_list.keys(), gradients[0].keys())
        for name, value in gradients[0].items():
            other = torch.zeros_like(of_list[name]) if value is None else value
            torch.testing.assert_close(of_list[name], other, rtol=0, atol=1e-12)
        state = listed.state_dict()
        there = zeroth.nn.stacked_state(block.experts, state)
        self.assertEqual(list(there), list(block.state_dict()))
        block.load_state_dict(there)
        back = zeroth.nn.listed_state(block.experts, there)
        self.assertTrue(all(torch.equal(back[name], value) for name, value in state.items()))
        listed.load_state_dict(back)
        self.assertIn("zeroth.nn.stack_experts()", str(zeroth.experts(listed)))
        self.assertIn("experts experts (Experts): 4", str(zeroth.experts(block)))

    def test_experts_that_are_not_alike_are_refused(self) -> None:
        for other, words in (
            (nn.Linear(4, 5), "expert 0 has itself: Linear.in_features=4, out_features=4.*expert 1 has .*=5"),
            (nn.Linear(4, 4).double(), "float32.*float64"),
            (nn.Sequential(nn.Linear(4, 4)), "Linear.*Sequential"),
            (nn.Linear(4, 4).requires_grad_(False), "trained.*frozen"),
            (nn.BatchNorm1d(4), "buffers"),
        ):
            with self.assertRaisesRegex(ValueError, words):
                zeroth.nn.stack_experts([nn.Linear(4, 4), other])
        with self.assertRaisesRegex(ValueError, "no experts"):
            zeroth.nn.stack_experts([])


class MixLora(unittest.TestCase):
    def test_a_new_one_is_the_frozen_mlp(self) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL)
        model = transformers.LlamaForCausalLM(config).double().eval()
        tokens = torch.arange(12).view(2, 6)
        with Doubles():
            before = model(tokens).logits
            zeroth.nn.add_mixlora(model, num_experts=5, rank=2, k=3)
            after = model(tokens).logits
        torch.testing.assert_close(before, after, rtol=0, atol=1e-12)
        self.assertIn("5, 5 a rank of ep=1: gate_a, gate_b, up_a", str(zeroth.experts(model)))

    def test_it_is_the_formula(self) -> None:
        torch.manual_seed(0)
        mlp = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).model.layers[0].mlp.double()
        layer = zeroth.nn.MixLora(mlp, num_experts=3, rank=2, k=2, alpha=5.0)
        own = dict(layer.experts.named_parameters())
        with torch.no_grad():
            for one in own.values():
                one.normal_()
        x = torch.randn(6, 16, dtype=torch.float64)
        logits = layer.router(x)
        got = layer(x)
        for token in range(6):
            best = logits[token].topk(2)
            wanted = torch.zeros(16, dtype=torch.float64)
            for weight, expert in zip(best.values.softmax(0), best.indices.tolist(), strict=True):

                def product(w: torch.Tensor, name: str, v: torch.Tensor, expert: int = expert) -> torch.Tensor:
                    return w @ v + 2.5 * own[f"{name}_b"][expert] @ (own[f"{name}_a"][expert] @ v)

                inside = nn.functional.silu(product(mlp.gate_proj.weight, "gate", x[token])) * product(
                    mlp.up_proj.weight, "up", x[token]
                )
                wanted = wanted + weight * product(mlp.down_proj.weight, "down", inside)
            torch.testing.assert_close(got[token], wanted, rtol=0, atol=1e-11)
        scores = logits.softmax(-1)
        f = torch.bincount(logits.topk(2).indices.flatten(), minlength=3).double() / 12
        self.assertAlmostEqual(layer.balance.item(), (3 * (f * scores.mean(0)).sum()).item(), places=12)

    def test_what_cannot_be_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "no MLP of three linear layers"):
            zeroth.nn.MixLora(nn.Linear(4, 4))
        with self.assertRaisesRegex(ValueError, "k is from 1 to num_experts=2, not 3"):
            zeroth.nn.MixLora(nn.Linear(4, 4), num_experts=2, k=3)
        with self.assertRaisesRegex(ValueError, r"no MLP whose name is like '\*.mlp'"):
            zeroth.nn.add_mixlora(nn.Sequential(nn.Linear(4, 4)))


class Tasks(unittest.TestCase):
    def test_rows_are_all_of_a_tasks_samples(self) -> None:
        shares = zeroth.nn.share_tasks([1.0, 9.0, 0.5], 4)
        samples = [3, 10, 2]
        for task, count in enumerate(samples):
            rows = [shares.rows(rank, samples)[task] for rank in range(4) if task in shares.rows(rank, samples)]
            self.assertEqual([one for part in rows for one in range(part.start, part.stop)], list(range(count)))
        self.assertEqual(shares.most, 3.0)
        with self.assertRaisesRegex(zeroth.Error, "there is no such plan of tasks"):
            zeroth.nn.share_tasks([], 2)


if __name__ == "__main__":
    tier.main()
