"""Linear layers and embeddings in tiles: the values and gradients of the plain layers, and their names."""

from __future__ import annotations

import unittest

import tier
import torch
from torch import nn

import zeroth
from zeroth import TiledEmbedding, TiledLinear


def run(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    module.zero_grad()
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    y = module(x)
    weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    return y.detach(), x.grad


def matrix(tiled: TiledLinear | TiledEmbedding, what: str) -> torch.Tensor:
    """Gradients of the tiles as one."""
    columns = len(tiled.in_sizes)
    rows = [
        torch.cat([getattr(tiled.tiles[row * columns + column], what).grad for column in range(columns)], 1)
        for row in range(len(tiled.out_sizes))
    ]
    return torch.cat(rows)


class Model(nn.Module):
    """With a tied head, an MLP, and an attention whose out_proj nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return self.head(x + self.attention(x, x, x)[0])  # type: ignore[no-any-return]


class Tiling(unittest.TestCase):
    def test_a_tiled_linear_is_the_plain_one(self) -> None:
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            for out_splits, in_splits, bias in ((4, 1, True), (3, 1, False), (1, 5, True), (3, 2, True)):
                torch.manual_seed(0)
                plain = nn.Linear(22, 37, bias=bias, dtype=dtype)
                tiled = TiledLinear.from_linear(plain, out_splits=out_splits, in_splits=in_splits)
                x = torch.randn(5, 3, 22, dtype=dtype)
                (y, dx), (got, dgot) = run(plain, x), run(tiled, x)
                row = (dtype, out_splits, in_splits, bias)
                torch.testing.assert_close(got, y, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(dgot, dx, rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(matrix(tiled, "weight"), plain.weight.grad, rtol=tolerance, atol=tolerance)
                self.assertTrue(torch.equal(tiled.to_linear().weight, plain.weight))
                with torch.no_grad():  # whole numbers: sums are exact in any order
                    for one in (*plain.parameters(), *tiled.parameters()):
                        one.mul_(64).round_()
                self.assertTrue(torch.equal(plain((x * 8).round()), tiled((x * 8).round())), row)
                largest = max(one.numel() for one in tiled.parameters())
                self.assertLessEqual(largest, -(-37 // out_splits) * -(-22 // in_splits))

    def test_a_tiled_embedding_has_the_bits_of_the_plain_one(self) -> None:
        for splits in (1, 3, 7):
            plain = nn.Embedding(29, 6, padding_idx=11)
            tiled = TiledEmbedding.from_embedding(plain, splits=splits)
            tokens = torch.randint(0, 29, (4, 31))
            tokens[0, :5] = 11
            (y, _), (got, _) = run(plain, tokens), run(tiled, tokens)
            self.assertTrue(torch.equal(y, got))
            self.assertTrue(torch.equal(matrix(tiled, "weight"), plain.weight.grad))
            run(tiled, torch.full((2, 2), 1))  # tokens of one tile: all the others are called, too
            self.assertTrue(all(one.weight.grad is not None for one in tiled.tiles))
            self.assertEqual(tiled(tokens[:0]).shape, (0, 31, 6))
        made = TiledEmbedding(10, 4, splits=3, padding_idx=-1)
        self.assertEqual(made.whole_weight()[9].abs().sum(), 0.0)
        with self.assertRaisesRegex(IndexError, "29 rows"):
            tiled(torch.tensor([29]))

    def test_a_model_in_tiles_and_back(self) -> None:
        plain, model = Model(), Model()
        paths = zeroth.tile(model, larger_than=1000)
        self.assertEqual(paths, ["embedding", "up", "down", "head"])
        self.assertIs(model.embedding.tiles[1], model.head.tiles[1], "tied: the same tiles")  # type: ignore[union-attr, index]
        self.assertLessEqual(max(p.nbytes for n, p in model.named_parameters() if "tiles" in n), 1000)
        tokens = torch.randint(0, 50, (2, 9))
        (y, _), (got, _) = run(plain, tokens), run(model, tokens)
        torch.testing.assert_close(got, y)
        torch.testing.assert_close(matrix(model.head, "weight"), plain.head.weight.grad)  # type: ignore[arg-type]
        state = zeroth.untiled_state_dict(model)
        self.assertEqual({k: v.shape for k, v in state.items()}, {k: v.shape for k, v in plain.state_dict().items()})
        self.assertTrue(all(torch.equal(state[name], value) for name, value in plain.state_dict().items()))
        other = Model()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.normal_()
        model.load_state_dict(other.state_dict())
        taken, wanted = zeroth.untiled_state_dict(model), other.state_dict()
        self.assertTrue(all(torch.equal(taken[name], value) for name, value in wanted.items()))
        tiled = zeroth.tiled_state_dict(model, plain.state_dict())
        self.assertEqual(tiled.keys(), model.state_dict().keys())
        model.load_state_dict(tiled)
        self.assertEqual(zeroth.untile(model), paths)
        self.assertIs(model.head.weight, model.embedding.weight)
        self.assertTrue(all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items()))

    def test_tiles_are_units(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))
        zeroth.tile(model, larger_than=2048)
        sizes = {unit.name: unit.num_params for unit in zeroth.units(model)}
        self.assertEqual(sizes["1.0.tiles.1"], 32 * 16 + 32)
        self.assertEqual(sizes["1.2.tiles.0"], 8 * 64 + 8)
        self.assertEqual(sum(sizes.values()), sum(parameter.numel() for parameter in model.parameters()))

    def test_new_layers_are_drawn_as_plain_ones(self) -> None:
        torch.manual_seed(0)
        made = TiledLinear(400, 300, in_splits=2, out_splits=3)
        weight = made.whole_weight()
        self.assertEqual(weight.shape, (300, 400))
        self.assertAlmostEqual(weight.abs().max().item(), 1 / 20, places=3)
        self.assertAlmostEqual(weight.std().item(), 1 / 20 / 3**0.5, places=3)
        self.assertIn("in_splits=2, out_splits=3", repr(made))

    def test_bad_input_is_refused(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "cut so often.*in_splits.*1 to 4.*got: 5"):
            TiledLinear(4, 9, in_splits=5)
        with self.assertRaisesRegex(zeroth.Error, "such options"):
            TiledEmbedding.from_embedding(nn.Embedding(9, 4, max_norm=1.0), splits=3)
        with self.assertRaisesRegex(zeroth.Error, "no such tiling"):
            zeroth.tile(Model(), larger_than=0)
        self.assertEqual(zeroth.tile(nn.Linear(4, 4), larger_than=1), [], "the module itself has no place")


if __name__ == "__main__":
    tier.main()
