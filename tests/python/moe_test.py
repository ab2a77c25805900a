"""zeroth.nn: layers of experts with their routers, alone and on ranks."""

from __future__ import annotations

import pathlib
import re
import tempfile
import unittest

import job
import tier
import torch
from torch import nn

import zeroth
import zeroth.nn
from zeroth.ckpt.command import main


class MoeTest(unittest.TestCase):
    def test_layers_on_ranks_are_like_plain_torch(self) -> None:
        """ep=2 x dp=2, stages 0 to 3: drops, draws, noise, residual experts, the balance loss; a resumed run."""
        with tempfile.TemporaryDirectory() as folder:
            done = job.run(4, "moe_rank.py", folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        for rank in range(4):
            self.assertIn(f"rank {rank}: all cases held", done.stdout)

    def test_the_example_trains_and_draws_the_load(self) -> None:
        """Losses of ep=2 and of ep=4 are alike; without a balance loss the load is less even."""
        losses, entropies = {}, {}
        for ep, balance in ((2, 0.05), (4, 0.05), (2, 0.0)):
            with tempfile.TemporaryDirectory() as folder:
                arguments = ["--ep", str(ep), "--balance", str(balance), "--steps", "24", "--every", "24"]
                done = job.run(4, "../../examples/moe/train.py", *arguments, "--width", "64", "--out", folder)
                self.assertEqual(done.returncode, 0, done.stderr)
                table = pathlib.Path(folder, "load.csv").read_text().splitlines()
            self.assertEqual(len(table), 1 + 24 * 2)
            counts = [int(word) for word in table[1].split(",")[2:]]
            self.assertEqual(sum(counts), 4 * 4 * 64 * 2, "choices of all ranks")
            found = re.search(r"step 24: loss (\S+), entropy of the load (\S+), (\S+)", done.stdout)
            assert found is not None, done.stdout
            losses[ep, balance] = float(found[1])
            entropies[ep, balance] = float(found[2]) + float(found[3])
        self.assertAlmostEqual(losses[2, 0.05], losses[4, 0.05], delta=0.01)
        self.assertLess(losses[2, 0.05], 4.0)
        self.assertGreater(entropies[2, 0.05], entropies[2, 0.0])

    def test_experts_are_their_modules(self) -> None:
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
        experts = zeroth.nn.Experts(expert, 3)
        self.assertEqual(experts.get_parameter("2__weight").shape, (3, 4, 9))
        self.assertTrue(torch.equal(experts.get_parameter("0__bias")[0], expert[0].bias))
        self.assertFalse(torch.equal(experts.get_parameter("0__bias")[1], expert[0].bias), "others are drawn anew")
        x = torch.randn(5, 6, dtype=torch.float64)
        chosen = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 0], [1, 0]])
        weights = torch.rand(5, 2, dtype=torch.float64)
        got = experts(x, chosen, weights)
        for token in range(5):
            sum_of = torch.zeros(4, dtype=torch.float64)
            for choice in range(2):
                if (one := int(chosen[token, choice])) >= 0:
                    w = {name: experts.get_parameter(f"{name}__weight")[one] for name in "02"}
                    b = {name: experts.get_parameter(f"{name}__bias")[one] for name in "02"}
                    sum_of = sum_of + weights[token, choice] * (
                        torch.tanh(x[token] @ w["0"].T + b["0"]) @ w["2"].T + b["2"]
                    )
            self.assertLess(float((got[token] - sum_of).detach().abs().max()), 1e-12)
        self.assertEqual(experts(x[:0], chosen[:0], weights[:0]).shape, (0, 4))
        nobody = experts(x, torch.full_like(chosen, -1), weights)
        self.assertTrue(torch.equal(nobody, torch.zeros_like(nobody)))
        nobody.sum().backward()

    def test_experts_are_left_out_of_a_checkpoint(self) -> None:
        """With their states: of stacked experts, and of a list of modules."""
        torch.manual_seed(0)
        model = nn.ModuleDict({"layer": zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, k=1, drop_tokens=False)})
        listed = nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": nn.ModuleList(nn.Linear(6, 6) for _ in range(4))})
        model["other"] = listed
        with tempfile.TemporaryDirectory() as folder:
            engine = zeroth.Engine(model, {"optimizer": {"type": "AdamW"}}, log_level="error")
            x = torch.randn(40, 6)
            of_listed = sum(expert(x) for expert in listed["experts"])  # type: ignore[operator]
            engine.backward(model["layer"](x)[0].sum() + of_listed.sum() + listed["gate"](x).sum())
            engine.step()
            saved = engine.save(folder)
            engine.close()
            target = pathlib.Path(folder, "pruned.pt")
            rules = ["--prune-experts", "layer=1,3", "--prune-experts", "other=0"]
            self.assertEqual(main(["convert", str(saved), str(target), *rules]), 0)
            pruned = torch.load(target, weights_only=True)
            weights = pruned.get("model", pruned.get("state_dict", pruned))
            for name in ("layer.experts.weight", "layer.experts.bias", "layer.gate.weight"):
                whole = model.get_parameter(name)
                self.assertTrue(torch.equal(weights[name], whole[[0, 2]]), name)
            self.assertTrue(torch.equal(weights["other.gate.weight"], listed["gate"].weight[1:]))
            for place in range(3):
                whole = model.get_parameter(f"other.experts.{place + 1}.weight")
                self.assertTrue(torch.equal(weights[f"other.experts.{place}.weight"], whole))
            self.assertNotIn("other.experts.3.weight", weights)
            fewer = nn.ModuleDict({"layer": zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=2, k=1)})
            fewer.load_state_dict({name: value for name, value in weights.items() if name.startswith("layer.")})
            for wrong in ("layer=0,1,2,3", "layer=4", "nowhere=0", "layer=a"):
                self.assertEqual(main(["convert", str(saved), f"{target}2.pt", "--prune-experts", wrong]), 64, wrong)

    def test_masked_tokens_and_an_evaluation(self) -> None:
        torch.manual_seed(0)
        layer = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=3, k=1, capacity_factor=0.1, min_capacity=1)
        x = torch.randn(2, 10, 6)
        out, balance, counts = layer(x, torch.arange(10).expand(2, 10) < 4)
        self.assertEqual(out.shape, x.shape)
        self.assertEqual(int(counts.sum()), 8)
        self.assertTrue(torch.equal(out[:, 4:], torch.zeros(2, 6, 6)), "masked tokens have no expert")
        self.assertEqual(int((out[:, :4].detach().abs().sum(-1) > 0).sum()), len([one for one in counts if one]))
        self.assertGreater(float(balance), 0)
        layer.eval()
        layer.eval_capacity_factor = 10.0
        first, second = layer(x)[0], layer(x)[0]
        self.assertTrue(torch.equal(first, second))
        self.assertEqual(int(layer.forwards), 1, "evaluations draw nothing")

    def test_what_cannot_be_is_refused(self) -> None:
        for words, arguments in (
            ("k is from 1 to num_experts=2", {"num_experts": 2, "k": 3}),
            ("noisy_gate_policy", {"noisy_gate_policy": "loud"}),
        ):
            with self.assertRaisesRegex(ValueError, words):
                zeroth.nn.MoE(6, nn.Linear(6, 6), **arguments)  # type: ignore[arg-type]
        with self.assertRaisesRegex(ValueError, "buffers"):
            zeroth.nn.Experts(nn.BatchNorm1d(6), 2)
        with self.assertRaisesRegex(ValueError, "MoE with ep_size"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=2, ep_size=4)


if __name__ == "__main__":
    tier.main()
