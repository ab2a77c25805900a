"""Reversible blocks: gradients of the plain computation, inputs rebuilt, memory flat in depth."""

from __future__ import annotations

import gc
import unittest

import tier
import torch
from torch import nn

import zeroth
from zeroth import Reversible, ReversibleSequence

WIDTH = 12


def part(width: int = WIDTH, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))


def sequence(depth: int, width: int = WIDTH, dropout: float = 0.0) -> ReversibleSequence:
    torch.manual_seed(2)
    return ReversibleSequence(Reversible(part(width, dropout), part(width, dropout)) for _ in range(depth))


def plain(model: ReversibleSequence, x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    for block in model.blocks:
        x1 = x1 + block.f(x2)  # type: ignore[operator]
        x2 = x2 + block.g(x1)  # type: ignore[operator]
    return torch.cat([x1, x2], -1)


class ReversibleBlocks(unittest.TestCase):
    def test_gradients_are_those_of_the_plain_computation(self) -> None:
        for dropout in (0.0, 0.4):
            model = sequence(5, dropout=dropout).double()
            x = torch.randn(7, 2 * WIDTH, dtype=torch.float64).requires_grad_()
            torch.manual_seed(4)
            expected = torch.autograd.grad(plain(model, x).square().sum(), [x, *model.parameters()])
            torch.manual_seed(4)
            y = model(x)
            torch.rand(9)  # the generator goes on
            state = torch.get_rng_state()
            y.square().sum().backward()
            self.assertTrue(torch.equal(torch.get_rng_state(), state), "backward leaves the generator as it was")
            for got, wanted in zip([x.grad, *(one.grad for one in model.parameters())], expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)

    def test_inputs_are_rebuilt(self) -> None:
        model = sequence(8)
        x = torch.randn(7, 2 * WIDTH)
        seen: list[torch.Tensor] = []
        for block in model.blocks:
            for inner in (block.f, block.g):
                inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))  # type: ignore[union-attr]
        y = model(x.requires_grad_())
        forward = list(seen)
        seen.clear()
        y.sum().backward()
        self.assertEqual(len(forward), 16)
        for once, again in zip(forward, reversed(seen), strict=True):
            torch.testing.assert_close(once, again, rtol=1e-5, atol=1e-5)
        self.assertFalse(
            all(torch.equal(a, b) for a, b in zip(forward, reversed(seen), strict=True)), "they are rebuilt"
        )
        one = model.blocks[0]
        torch.testing.assert_close(one.inverse(one(x)), x, rtol=1e-5, atol=1e-5)  # type: ignore[operator]

    def test_memory_is_flat_in_depth(self) -> None:
        width, rows = 128, 1024

        def saved(depth: int, reversible: bool) -> int:
            """Bytes that autograd keeps."""
            model, x = sequence(depth, width), torch.randn(rows, 2 * width).requires_grad_()
            kept: dict[int, int] = {}

            def note(tensor: torch.Tensor) -> torch.Tensor:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                y = model(x) if reversible else plain(model, x)
            y.sum().backward()
            gc.collect()
            return sum(kept.values())

        self.assertEqual(saved(8, True), saved(2, True))
        self.assertGreater(saved(8, False), 3 * saved(2, False))

    def test_what_needs_no_gradient_and_what_is_alone(self) -> None:
        model = sequence(2)
        x = torch.randn(3, 2 * WIDTH)
        model(x).sum().backward()
        self.assertTrue(all(one.grad is not None for one in model.parameters()))
        with torch.no_grad():
            self.assertFalse(model(x).requires_grad)
        frozen = sequence(2).requires_grad_(False)
        self.assertFalse(frozen(x).requires_grad)
        x.requires_grad_()
        frozen(x).sum().backward()
        self.assertIsNotNone(x.grad)
        alone = Reversible(part(), nn.Identity())
        torch.testing.assert_close(alone.inverse(alone(x)), x, rtol=1e-5, atol=1e-5)
        alone(x).sum().backward()
        images = Reversible(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), dim=1)
        images(torch.randn(1, 4, 5, 5)).sum().backward()

    def test_bad_input_is_refused(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "two halves.*shape \\[3, 5\\]"):
            sequence(1)(torch.randn(3, 5))
        with self.assertRaisesRegex(zeroth.Error, "changes the shape"):
            Reversible(nn.Linear(WIDTH, 3), part())(torch.randn(3, 2 * WIDTH))
        with self.assertRaisesRegex(zeroth.Error, "split one dimension"):
            ReversibleSequence([Reversible(part(), part(), dim=1)])
        x = torch.randn(3, 2 * WIDTH).requires_grad_()
        (first,) = torch.autograd.grad(sequence(1)(x).square().sum(), x, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "differentiate twice"):
            first.sum().backward()


if __name__ == "__main__":
    tier.main()
