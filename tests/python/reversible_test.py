"""Reversible blocks: gradients of the plain computation, inputs rebuilt, memory flat in depth."""

from __future__ import annotations

import gc
import subprocess
import sys
import unittest

import tier
import torch
from torch import nn

import zeroth
from zeroth import Reversible, ReversibleSequence

WIDTH = 12
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}


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


HALF_ROWS, HALF_WIDTH = 8192, 128

RESIDENT = """
import sys, torch, zeroth
from torch import nn

torch.set_num_threads(1)
rows, width, depth = map(int, sys.argv[1:])
def part():
    return nn.Sequential(nn.Linear(width, width), nn.GELU())
model = zeroth.ReversibleSequence(zeroth.Reversible(part(), part()) for _ in range(depth))
x = torch.randn(rows, 2 * width)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")  # from here on
before = peak()
for _ in range(3):
    model(x).square().mean().backward()
    model.zero_grad()
print((peak() - before) / (rows * width * 4))
"""


def resident_halves(depth: int) -> float:
    """What training takes at its peak, in halves of the input."""
    arguments = [str(one) for one in (HALF_ROWS, HALF_WIDTH, depth)]
    done = subprocess.run([sys.executable, "-c", RESIDENT, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout)


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

    def test_buffers_are_written_once_and_read_as_in_the_forward(self) -> None:
        class Drifting(nn.Module):
            """Its output depends on a buffer that each forward changes, in place or by another tensor."""

            def __init__(self, in_place: bool) -> None:
                super().__init__()
                self.linear, self.in_place = nn.Linear(WIDTH, WIDTH), in_place
                self.register_buffer("scale", torch.ones(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.tanh(self.linear(x) * self.scale.clone())
                if self.in_place:
                    self.scale.mul_(1.5)  # type: ignore[operator]
                else:
                    self.scale = self.scale * 1.5
                return y

        def made() -> ReversibleSequence:
            torch.manual_seed(3)
            parts = [nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)), Drifting(True), Drifting(False)]
            norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
            return ReversibleSequence([Reversible(parts[0], parts[1]), Reversible(parts[2], norm)]).double()

        for stage in (None, 0, 3):
            model, other = made(), made()
            engine = (
                None
                if stage is None
                else zeroth.Engine(model, {**SGD, "zero_optimization": {"stage": stage}}, log_level="warning")
            )
            for step in range(3):
                x = torch.randn(7, 2 * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                expected = plain(other, x).square().sum()
                expected.backward()
                y = model(x)
                loss = y.square().sum()
                torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
                if engine is None:
                    loss.backward()
                    for got, wanted in zip(model.parameters(), other.parameters(), strict=True):
                        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-9, atol=1e-10)
                else:
                    engine.backward(loss)
                    self.assertTrue(engine.step().committed)
                other.zero_grad() if engine is None else torch.optim.SGD(other.parameters(), lr=1e-3).step()
                model.zero_grad() if engine is None else other.zero_grad()
                for (name, got), wanted in zip(model.named_buffers(), other.buffers(), strict=True):
                    torch.testing.assert_close(
                        got, wanted, rtol=1e-9, atol=0, msg=lambda text, name=name: f"{name}: {text}"
                    )
            if engine is not None:
                engine.close()
        alone = made().blocks[0]
        before = {name: one.clone() for name, one in alone.named_buffers()}
        alone.inverse(torch.randn(5, 2 * WIDTH, dtype=torch.float64))  # type: ignore[operator]
        self.assertTrue(all(torch.equal(one, before[name]) for name, one in alone.named_buffers()))

    def test_resident_memory_is_flat_in_depth(self) -> None:
        """Of fresh processes; also of what glibc keeps."""
        four, sixteen = (resident_halves(depth) for depth in (4, 16))
        self.assertLess(sixteen - four, 16, f"halves of {four} at depth 4, {sixteen} at depth 16")

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
