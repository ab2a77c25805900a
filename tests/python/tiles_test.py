"""Tiled MLPs and losses: values and gradients of the untiled, and the logits of one tile alive."""

from __future__ import annotations

import sys
import unittest
from typing import Any

import forked
import job
import tier
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import zeroth
from zeroth.parallel import run_tiles, tile_loss, tile_mlps, tiled_loss, tiled_mlp

sys.path.insert(0, str(job.HERE.parents[1] / "benchmarks/support"))
from live_bytes import peak_bytes  # noqa: E402

forked.preload("transformers", "transformers.models.llama.modeling_llama")
BOUND = {torch.float64: 1e-12, torch.float32: 1e-6}
S, H, V = 37, 16, 50


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(H, 64), nn.Linear(64, H), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.dropout(F.silu(self.up(x))))
        return result


class TilesTest(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)

    def same(self, got: Any, expected: Any, bound: float, what: object = "") -> None:
        for one, other in zip(got, expected, strict=True):
            scale = max(1.0, other.abs().max().item())
            self.assertLessEqual((one - other).abs().max().item(), bound * scale, what)

    def refused(self, text: str, call: Any) -> None:
        with self.assertRaisesRegex(zeroth.Error, text):
            call()


class Losses(TilesTest):
    def test_values_and_gradients_are_those_of_cross_entropy(self) -> None:
        for dtype, bound in BOUND.items():
            hidden = torch.randn(2, S, H, dtype=dtype, requires_grad=True)
            weight, bias = (torch.randn(V, *more, dtype=dtype, requires_grad=True) for more in ((H,), ()))
            labels = torch.randint(0, V, (2, S))
            labels[0, :20] = labels[1, 30] = -100
            for softcap in (None, 5.0):
                logits = 1.5 * (hidden @ weight.T + bias)
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                grads = torch.autograd.grad(3 * expected, [hidden, weight, bias])
                for tiles in (1, 3, None, 2 * S, 100):
                    loss = tiled_loss(hidden, weight, labels, tiles, bias=bias, scale=1.5, softcap=softcap)
                    got = torch.autograd.grad(3 * loss, [hidden, weight, bias])
                    self.same([loss.detach(), *got], [expected.detach(), *grads], bound, (dtype, softcap, tiles))

    def test_no_label_counts_and_nothing_requires_a_gradient(self) -> None:
        hidden, weight = torch.randn(S, H, requires_grad=True), torch.randn(V, H)
        loss = tiled_loss(hidden, weight, torch.full((S,), -100))
        loss.backward()
        self.assertEqual((loss.item(), hidden.grad.abs().sum().item()), (0.0, 0.0))  # type: ignore[union-attr]
        self.assertFalse(tiled_loss(hidden.detach(), weight, torch.zeros(S, dtype=torch.int64)).requires_grad)

    def test_16_bit_sums_are_made_in_float32(self) -> None:
        hidden = torch.randn(512, H, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(V, H, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, V, (512,))
        wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
        F.cross_entropy(wide[0] @ wide[1].T, labels).backward()
        loss = tiled_loss(hidden, weight, labels, 64)
        self.assertEqual(loss.dtype, torch.float32)
        loss.backward()
        # Of one tile the logits' gradients are rounded to 8 bits; the sum over 64 tiles is not.
        for one, other in zip((hidden, weight), wide, strict=True):
            error = (one.grad.double() - other.grad).norm() / other.grad.norm()  # type: ignore[union-attr]
            self.assertLess(error.item(), 2**-7)

    def test_the_peak_is_the_logits_of_one_tile(self) -> None:
        tokens, vocabulary = 512, 1024
        hidden, weight = torch.randn(tokens, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
        labels = torch.randint(0, vocabulary, (tokens,))
        full = 4 * tokens * vocabulary
        kept = 4 * (tokens + vocabulary) * H  # the two gradients
        self.assertGreaterEqual(peak_bytes(lambda: F.cross_entropy(hidden @ weight.T, labels).backward()), 2 * full)
        for tiles in (1, 4, 16):
            peak = peak_bytes(lambda: tiled_loss(hidden, weight, labels, tiles)) - kept
            rows = tokens // tiles
            self.assertGreaterEqual(peak, full // tiles)
            self.assertLessEqual(peak, full // tiles + 32 * rows + 64, f"{tiles} tiles; per row: targets and sums")

    def test_what_is_refused(self) -> None:
        hidden, weight, labels = torch.randn(S, H), torch.randn(V, H), torch.zeros(S, dtype=torch.int64)
        self.refused("do not fit the head", lambda: tiled_loss(hidden, weight.T, labels))
        self.refused("other dtypes", lambda: tiled_loss(hidden, weight.double(), labels))
        self.refused("not one a position", lambda: tiled_loss(hidden, weight, labels[1:]))
        self.refused("outside of the vocabulary.*0 to 49", lambda: tiled_loss(hidden, weight, labels + V))
        self.refused("bias does not fit", lambda: tiled_loss(hidden, weight, labels, bias=torch.zeros(3)))
        self.refused("too few tiles", lambda: tiled_loss(hidden, weight, labels, 0))


class Mlps(TilesTest):
    def test_values_and_gradients_are_those_of_the_module(self) -> None:
        for dtype, bound in BOUND.items():
            mlp = Mlp().to(dtype)
            x = torch.randn(2, S, H, dtype=dtype, requires_grad=True)
            toward = torch.randn_like(x)
            expected = mlp(x)
            grads = torch.autograd.grad(expected, [x, *mlp.parameters()], toward)
            for tiles in (1, 3, None, 40):
                out = tiled_mlp(mlp, x, tiles)
                got = torch.autograd.grad(out, [x, *mlp.parameters()], toward)
                self.same([out, *got], [expected, *grads], bound, (dtype, tiles))
            frozen = x.detach()
            mlp.up.weight.requires_grad_(False)
            got = torch.autograd.grad(tiled_mlp(mlp, frozen, 3), [mlp.up.bias], toward)
            self.same(got, [grads[2]], bound)

    def test_each_gradient_comes_once(self) -> None:
        mlp, fired = Mlp(), []
        for name, parameter in mlp.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
        tiled_mlp(mlp, torch.randn(1, S, H), 5).sum().backward()
        self.assertEqual(sorted(fired), sorted(name for name, _ in mlp.named_parameters()))

    def test_backward_has_the_random_numbers_and_the_autocast_of_forward(self) -> None:
        mlp, x = Mlp(0.4), torch.randn(1, S, H)
        torch.manual_seed(5)
        parts = [mlp(tile.contiguous()) for tile in x.tensor_split(4, 1)]
        grads = torch.autograd.grad(torch.cat(parts, 1).sum(), list(mlp.parameters()))
        after = torch.rand(3)
        torch.manual_seed(5)
        out = tiled_mlp(mlp, x, 4)
        state = torch.get_rng_state()
        got = torch.autograd.grad(out.sum(), list(mlp.parameters()))
        self.assertTrue(torch.equal(torch.get_rng_state(), state))
        self.same(got, grads, 1e-6)
        self.assertTrue(torch.equal(torch.rand(3), after))
        seen = []
        with torch.autocast("cpu", torch.bfloat16):
            linear = nn.Linear(H, H)
            out = run_tiles(
                lambda tile: seen.append(linear(tile).dtype) or linear(tile), x, 2, parameters=[*linear.parameters()]
            )  # type: ignore[func-returns-value]
        out.sum().backward()
        self.assertEqual(seen, [torch.bfloat16] * 4)

    def test_what_is_refused(self) -> None:
        x, weight = torch.randn(1, S, H, requires_grad=True), torch.randn(H, H, requires_grad=True)
        self.refused("would be lost.*shape.*16, 16", tiled_mlp(lambda tile: tile @ weight, x, 3).sum().backward)
        tiled_mlp(lambda tile: tile @ weight, x, 3, parameters=[weight]).sum().backward()
        twice = 2 * weight  # given, and no leaf
        tiled_mlp(lambda tile: tile @ twice, x, 3, parameters=[twice]).sum().backward()
        self.refused("not as long as the tile", lambda: tiled_mlp(lambda tile: tile[:, 1:], x, 3))
        self.refused("no sequence", lambda: tiled_mlp(Mlp(), x[0, 0], 3))
        self.refused("too few tiles", lambda: tiled_mlp(Mlp(), x, 0))
        mlp = Mlp()
        out = tiled_mlp(mlp, x, 3)
        with torch.no_grad():
            mlp.up.weight.zero_()
        self.refused("written to between", out.sum().backward)

    def test_the_peak_falls_with_the_tiles(self) -> None:
        mlp, x = nn.Sequential(nn.Linear(H, 1024), nn.SiLU(), nn.Linear(1024, H)), torch.randn(1, 1024, H)
        untiled = peak_bytes(lambda: mlp(x).sum().backward())
        tiled = peak_bytes(lambda: tiled_mlp(mlp, x, 16).sum().backward())
        self.assertLess(tiled, untiled / 6)


class HuggingFace(TilesTest):
    sizes = {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    softcap = {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 4.0}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = {"vocab_size": V, "n_embd": H, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    models = (
        (LlamaForCausalLM, LlamaConfig(**sizes)),  # type: ignore[arg-type]
        (Gemma2ForCausalLM, Gemma2Config(**sizes, **softcap)),  # type: ignore[arg-type]
        (GPT2LMHeadModel, GPT2Config(**gpt2, **dropouts)),  # type: ignore[arg-type]
    )

    def test_a_decoder_without_changes_to_it(self) -> None:
        for kind, config in self.models:
            model = kind(config).float()
            ids = torch.randint(0, V, (2, S))
            labels = ids.clone()
            labels[0, :20] = -100
            for more in ({}, {"num_items_in_batch": 7}, {"shift_labels": labels}):
                expected = model(input_ids=ids, labels=labels, **more).loss
                grads = torch.autograd.grad(expected, list(model.parameters()))
                mlps, loss = tile_mlps(model), tile_loss(model, 4)
                out = model(input_ids=ids, labels=labels, **more)
                self.assertIsNone(out.logits)
                self.same([out.loss], [expected], 2e-6, (kind, more))
                self.same(torch.autograd.grad(out.loss, list(model.parameters())), grads, 2e-6, (kind, more))
                self.assertEqual((mlps.calls, loss.calls), (len(mlps.paths), 1))
                self.assertEqual(model(input_ids=ids).logits.shape, (2, S, V))
                self.assertEqual(model(input_ids=ids, labels=labels, return_dict=False)[0].shape, ())
                self.refused("tiled already", lambda model=model: tile_loss(model))
                self.refused("replaced already", lambda model=model: tile_mlps(model))
                mlps.undo()
                loss.undo()
                self.assertTrue(torch.equal(model(input_ids=ids, labels=labels, **more).loss, expected))

    def test_what_is_refused(self) -> None:
        self.refused("no causal language model", lambda: tile_loss(Mlp()))
        self.refused("not in the model", lambda: tile_mlps(Mlp()))
        model = LlamaForCausalLM(self.models[0][1])  # type: ignore[arg-type]
        tile_loss(model)
        model.loss_function = lambda logits, labels, **_: logits.view(-1).sum()
        self.refused(
            "tiles cannot follow.*view",
            lambda: model(input_ids=torch.zeros(1, 3, dtype=torch.int64), labels=torch.zeros(1, 3, dtype=torch.int64)),
        )


class Engines(job.RankTest):
    def test_inside_zero_3_on_two_ranks(self) -> None:
        self.assertEqual(self.run_well(2, "tiles_rank.py").count("tiles: ok"), 2)

    def test_ranks_share_vocabulary_or_sequence(self) -> None:
        self.assertEqual(self.run_well(2, "tiles_shared_rank.py").count("shared tiles: ok"), 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tier.main()
