"""zeroth.nn: layers of experts with their routers, alone and on ranks."""

from __future__ import annotations

import copy as copying
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
from typing import Any

import job
import tier
import torch
import torch.utils.checkpoint
from torch import nn

import zeroth
import zeroth.nn
from zeroth.ckpt.command import main


class Gated(nn.Module):
    """The experts of zeroth::libtorch::GatedExperts."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        exchange = zeroth.nn.TokenExchange(experts, len(self.down))
        gate, up = zeroth.nn.grouped_linear(exchange.send(tokens), self.gate_up, None, exchange.rows).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
        return exchange.bring(zeroth.nn.grouped_linear(hidden, self.down, None, exchange.rows), weights)


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

    def test_the_example_is_a_pyramid(self) -> None:
        """Two experts, then four, and a residual one in each layer."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--experts", "2,4", "--residual", "--steps", "2", "--every", "2", "--width", "32"]
            done = job.run(2, "../../examples/moe/train.py", *arguments, "--out", folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            table = pathlib.Path(folder, "load.csv").read_text().splitlines()
        self.assertEqual([len(row.split(",")) for row in table], [6, 4, 6, 4, 6])
        self.assertIn("step 2: loss", done.stdout)

    def test_a_layer_of_cpp_has_the_same_bits(self) -> None:
        """Outputs, losses, biases and gradients of three steps, with noise, drops, residual and shared experts."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layer = zeroth.nn.MoE(
            6,
            nn.Linear(6, 6),
            num_experts=4,
            k=2,
            capacity_factor=0.6,
            min_capacity=1,
            use_residual=True,
            noisy_gate_policy="Jitter",
            seed=11,
            scale=1.5,
            balance="both",
            balance_rate=0.05,
            shared_expert=nn.Linear(6, 6),
        )
        layer.experts = Gated(4, 6, 5)  # type: ignore[assignment]
        x = torch.randn(3, 20, 6)
        with tempfile.TemporaryDirectory() as folder:
            given, made = pathlib.Path(folder, "in.pt"), pathlib.Path(folder, "out.pt")
            torch.save({"x": x, **{name: one.detach() for name, one in layer.named_parameters()}}, given)
            program = pathlib.Path(os.environ["ZEROTH_BUILD"], "tests/python/moe_program")
            subprocess.run([program, given, made], check=True, timeout=120)
            expected = torch.load(made, weights_only=False)  # of TorchScript
        got: dict[str, torch.Tensor] = {}
        for step in range(3):
            out, balance, counts = layer(x[step])
            (out.square().sum() + balance).backward()
            layer.begin_step()
            bias = layer.balance_bias.clone()
            got |= {f"out.{step}": out, f"balance.{step}": balance, f"counts.{step}": counts, f"bias.{step}": bias}
        got |= {f"gradient of {name}": one.grad for name, one in layer.named_parameters() if one.grad is not None}
        self.assertEqual(got.keys(), set(expected))
        for name, value in got.items():
            self.assertTrue(torch.equal(value, expected[name]), name)

    def test_a_checkpointed_forward_repeats_its_draws(self) -> None:
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
        results = []
        for repeated in (False, True):
            torch.manual_seed(0)
            arguments: dict[str, Any] = {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 2}
            layer = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, **arguments)
            for step in range(2):
                if repeated:
                    out, balance, _ = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                else:
                    out, balance, _ = layer(x)
                (out.square().sum() + balance).backward()
                self.assertEqual(sum(layer.load.chosen), 24, "a repeated forward is not counted")
                self.assertEqual(int(layer.forwards), step + 1)
                layer.begin_step()
            results.append([out, balance, *(one.grad for one in layer.parameters())])
        for plain, again in zip(*results, strict=True):
            self.assertTrue(torch.equal(plain, again))

    def test_forwards_that_wait_for_their_backwards_repeat_each_its_own(self) -> None:
        """As in a pipeline: three forwards, then their backwards in one order or the other."""
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(24, 6, generator=generator) for _ in range(3)]
        arguments: dict[str, Any] = {"k": 2, "noisy_gate_policy": "Jitter", "capacity_factor": 0.7, "min_capacity": 1}
        for order in ((0, 1, 2), (2, 1, 0)):
            results = []
            for repeated in (False, True):
                torch.manual_seed(0)
                layer = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, **arguments)
                losses = []
                for x in inputs:
                    if repeated:
                        out, balance, _ = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                    else:
                        out, balance, _ = layer(x)
                    losses.append(out.square().sum() + balance)
                for one in order:
                    losses[one].backward()
                self.assertEqual(sum(layer.load.chosen), 3 * 24 * 2)
                results.append([*losses, *(one.grad for one in layer.parameters())])
            for plain, again in zip(*results, strict=True):
                self.assertTrue(torch.equal(plain, again))

    def test_the_log_says_how_even_the_load_is(self) -> None:
        """Of the micro-batches of a step, one record, without those of an evaluation."""
        torch.manual_seed(0)
        layers = (
            zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=2, k=2),
            zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, capacity_factor=0.5, min_capacity=1),
        )
        model = nn.ModuleList(layers)
        settings = {"optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 2}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "log.jsonl")
            engine = zeroth.Engine(model, settings, log_level="off", json_log=str(path))
            dropped = 0
            for _ in range(2):
                x = torch.randn(20, 6)
                engine.backward(model[0](x)[0].sum() + model[1](x)[0].sum())
                dropped += engine.moe_report()[1].dropped
                engine.eval()
                model[1](torch.ones(50, 6))
                engine.train()
                engine.step()
            engine.close()
            records = [json.loads(line) for line in path.read_text().splitlines()]
        (found,) = [record for record in records if record["event"] == "experts"]
        self.assertEqual((found["step"], found["layer"], found["dropped"]), (1, "1", dropped))
        self.assertGreater(dropped, 0)
        self.assertLessEqual(found["entropy"], 1.0)
        self.assertGreater(found["entropy"], 0.9, "drops make the rest even")

    def test_choices_and_a_fixed_router(self) -> None:
        layer = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, router="fixed", seed=3, schedule=(1, 4, 6))
        again = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, router="fixed", seed=3)
        self.assertTrue(torch.equal(layer.gate.weight, again.gate.weight))
        self.assertFalse(layer.gate.weight.requires_grad)
        self.assertEqual([zeroth.nn.choices_at(step, 6, 1, 4) for step in (0, 1, 2, 5, 6, 7)], [1, 1, 2, 3, 4, 4])
        for _ in range(2):
            layer.begin_step()
        self.assertEqual(layer.k, 2)
        copy = zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, router="fixed", schedule=(1, 4, 6))
        copy.load_state_dict(layer.state_dict())
        self.assertEqual(copy.k, 2)
        with self.assertRaisesRegex(zeroth.Error, "schedule"):
            layer.set_choices(3)
        again.set_choices(3)
        again = copying.deepcopy(again)
        self.assertEqual(int(again(torch.randn(5, 6))[2].sum()), 15)

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
        with self.assertWarnsRegex(UserWarning, "use_tutel has no effect"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), use_tutel=True)
        with self.assertRaisesRegex(NotImplementedError, "enable_expert_tensor_parallelism"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), enable_expert_tensor_parallelism=True)
        with self.assertRaisesRegex(zeroth.Error, "softmax"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=4, score="sigmoid", noisy_gate_policy="RSample")
        with self.assertRaisesRegex(ValueError, "router"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), router="loud")  # type: ignore[arg-type]
        layer = nn.Sequential(zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=2, ep_size=2))
        with self.assertRaisesRegex(zeroth.Error, r"0: MoE\(ep_size\).*ep_size=2"):
            zeroth.Engine(layer, {"optimizer": {"type": "AdamW"}}, log_level="error")
        with self.assertRaisesRegex(zeroth.Error, "e_score_correction_bias"):
            zeroth.nn.update_balance_bias(nn.Linear(2, 2))
        with self.assertRaisesRegex(ValueError, "buffers"):
            zeroth.nn.Experts(nn.BatchNorm1d(6), 2)
        with self.assertRaisesRegex(ValueError, "MoE with ep_size"):
            zeroth.nn.MoE(6, nn.Linear(6, 6), num_experts=2, ep_size=4)


if __name__ == "__main__":
    tier.main()
