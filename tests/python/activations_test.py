"""Saved tensors in files: the gradients of memory, to the last bit; memory flat in depth; nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import weakref
from collections.abc import Callable
from typing import Any

import job
import tier
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth

WIDTH = 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1)


class Deep(nn.Module):
    """`how`: None, or use_reentrant of the checkpoints around the blocks."""

    def __init__(self, depth: int, how: bool | None, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.how = nn.ModuleList(Block(width) for _ in range(depth)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
        return x.square().mean()


def inputs(rows: int = 64, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(5)).requires_grad_()


def gradients(model: nn.Module, x: torch.Tensor, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(7)
    run().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


class Activations(unittest.TestCase):
    def setUp(self) -> None:
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = made.name

    def moved(self, **named: Any) -> zeroth.ActivationOffload:
        named = {"min_bytes": 1, "piece_bytes": 4096, "buffer_bytes": 65536, **named}
        return zeroth.offload_activations(self.folder, **named)

    def test_gradients_are_those_of_memory_to_the_last_bit(self) -> None:
        for how in (None, True, False):
            for saved in ("checkpoints", "all"):
                model, x = Deep(6, how), inputs()
                expected = gradients(model, x, lambda: model(x))
                moved = self.moved(saved=saved, buffer_bytes=1 << 15 if saved == "checkpoints" else 1 << 18)
                moved.keep(model.parameters())

                def run() -> torch.Tensor:
                    with moved:
                        return model(x)

                for _ in range(2):
                    self.assertTrue(alike(gradients(model, x, run), expected), (how, saved))
                report = moved.report()
                self.assertEqual(report["live"], 0, (how, saved, report))
                self.assertLessEqual(report["on_demand"], 6, "more only while slots wait for a slow disk")
                if saved == "checkpoints":
                    self.assertEqual(report["moved"], 0 if how is None else 12, (how, report))
                else:
                    self.assertGreaterEqual(report["moved"], 12)

    def test_memory_is_flat_in_depth(self) -> None:
        """The memory of this process at the end of a forward. With the inputs in memory it grows by one each unit."""
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
        self.resident(1, True)  # what the first call of all brings
        few, many = self.resident(4, True), self.resident(24, True)
        self.assertLess(many - few, 5 * RESIDENT)
        self.assertGreater(self.resident(24, False) - self.resident(4, False), 14 * RESIDENT, "the test can fail")

    def resident(self, depth: int, files: bool) -> int:
        """Growth of this process' memory over a forward of `depth` units whose inputs have RESIDENT bytes each."""
        moved = self.moved(buffer_bytes=1 << 20, piece_bytes=1 << 17) if files else None
        x = torch.zeros(RESIDENT // 4).requires_grad_()
        before = rss()
        y = x
        for _ in range(depth):
            if moved is not None:
                with moved:
                    y = checkpoint(torch.sin, y, use_reentrant=False)
            else:
                y = checkpoint(torch.sin, y, use_reentrant=False)
        grown = rss() - before
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.ones_like(x)))  # type: ignore[arg-type]
        if moved is not None:
            report = moved.report()
            self.assertEqual((report["peak_live_bytes"], report["live"]), (depth * RESIDENT, 0))
            self.assertGreaterEqual(report["file_bytes"], report["peak_live_bytes"])
        return grown

    def test_bytes_that_are_saved_twice_are_written_once(self) -> None:
        moved = self.moved(saved="all")
        x = torch.randn(8, 3 * WIDTH).requires_grad_()
        with moved:
            y = x * 1.5
            q, k, v = y.chunk(3, 1)
            loss = (q * k * v).sum() + (y * y).sum() + (y.t() @ y).sum()
        report = moved.report()
        # y; q * k; nothing of the scalar 1.5
        self.assertEqual(report["moved"], 2, report)
        self.assertGreaterEqual(report["shared"], 5, report)
        self.assertEqual(report["bytes_moved"], y.nbytes + q.nbytes)
        loss.backward()
        again = x.detach().requires_grad_()
        z = again * 1.5
        a, b, c = z.chunk(3, 1)
        ((a * b * c).sum() + (z * z).sum() + (z.t() @ z).sum()).backward()
        self.assertTrue(torch.equal(x.grad, again.grad))  # type: ignore[arg-type]
        self.assertEqual(moved.report()["live"], 0)

    def test_every_dtype_stride_and_view_comes_back(self) -> None:
        tensors = self.moved(saved="all")._tensors
        made = [
            torch.randn(5, 7, dtype=dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
        ]
        made += [torch.arange(70, dtype=dtype).view(10, 7) for dtype in (torch.int8, torch.int32, torch.int64)]
        made += [torch.rand(9, 9) > 0.5, torch.randn(3, 4).to(torch.float8_e4m3fn)]
        base = torch.randn(6, 8, 10)
        made += [base.transpose(0, 2), base[:, 1:3], base[::2, :, 3], base[2:3].expand(4, 8, 10), base.view(-1)[7:]]
        made += [torch.tensor(3.0), made[4].conj(), torch.randn(4).to(torch.complex64).conj().imag]
        for one in made:
            packed = tensors.pack(one, True)
            self.assertTrue(packed.moved, one.shape)
            got = packed.unpack()
            self.assertEqual((got.shape, got.stride(), got.dtype), (one.shape, one.stride(), one.dtype))
            self.assertEqual((got.is_conj(), got.is_neg()), (one.is_conj(), one.is_neg()))
            self.assertEqual(got.data_ptr() % 64, one.data_ptr() % 64)
            self.assertTrue(
                torch.equal(
                    got.contiguous().view(torch.uint8) if got.dim() and not got.is_conj() and not got.is_neg() else got,
                    one.contiguous().view(torch.uint8) if one.dim() and not one.is_conj() and not one.is_neg() else one,
                ),
                one,
            )
        for stays in (torch.zeros(0), torch.eye(3).to_sparse(), torch.from_numpy(torch.zeros(9).numpy())):
            self.assertFalse(tensors.pack(stays, True).moved)

    def test_a_tensor_that_was_modified_in_place_is_caught(self) -> None:
        for saved in ("all", "checkpoints"):
            x = torch.randn(8, 8).requires_grad_()
            with self.moved(saved=saved):
                y = x.exp()
                loss = (y * y).sum()
            with torch.no_grad():
                y.mul_(2.0)
            with self.assertRaisesRegex(Exception, "modified by an inplace operation"):
                loss.backward()
        model, x = Deep(3, False), inputs()
        with self.moved():
            first = x * 1.0
            loss = model(first)
        first.data.add_(1.0)  # behind the counter's back, as in plain torch: it computes with what was saved
        loss.backward()
        with self.moved():
            first = x * 1.0
            loss = model(first)
        with torch.no_grad():
            first.add_(1.0)
        with self.assertRaisesRegex(zeroth.Error, "modified by an inplace operation.*version 0"):
            loss.backward()

    def test_what_is_not_needed_any_more_is_dropped(self) -> None:
        moved = self.moved(saved="all")
        model, x = Deep(4, None), inputs()
        with torch.no_grad(), moved:
            model(x)
        self.assertEqual(moved.report()["moved"], 0, "nothing is saved without a graph")
        with moved:
            loss = model(x)
        self.assertGreater(moved.report()["live"], 4)
        del loss
        self.assertEqual(moved.report()["live"], 0, "a loss that is thrown away")

        def fails(*_: Any) -> None:
            raise ValueError("in the middle")

        model.blocks[2].register_forward_pre_hook(fails)
        try:
            with moved:
                model(x)
        except ValueError as error:
            self.assertIn("in the middle", str(error))
        gc.collect()
        self.assertEqual(moved.report()["live"], 0, "an exception in a forward")
        size = moved.report()["file_bytes"]
        for _ in range(5):
            with moved:
                torch.tanh(x).sum().backward()
        self.assertEqual(moved.report()["file_bytes"], size, "place is used again")
        gone = weakref.ref(moved)
        del moved
        gc.collect()
        self.assertIsNone(gone())

    def test_a_graph_may_be_used_again(self) -> None:
        moved = self.moved(saved="all")
        x = torch.randn(16, 16, dtype=torch.float64).requires_grad_()

        def loss() -> torch.Tensor:
            return (torch.tanh(x @ x) * x.exp()).sum()

        (plain,) = torch.autograd.grad(loss(), x, create_graph=True)
        (second,) = torch.autograd.grad(plain.square().sum(), x)
        with moved:
            (first,) = torch.autograd.grad(loss(), x, create_graph=True)
            (got,) = torch.autograd.grad(first.square().sum(), x)
        self.assertTrue(torch.equal(first, plain) and torch.equal(got, second))
        with moved:
            twice = loss()
        one = torch.autograd.grad(twice, x, retain_graph=True)[0]
        self.assertTrue(torch.equal(one, torch.autograd.grad(twice, x)[0]))
        with self.assertRaisesRegex(RuntimeError, "a second time"):
            twice.backward()
        del first, plain, got, second, twice
        self.assertEqual(moved.report()["live"], 0)

    def test_graphs_that_do_not_end_in_the_reverse_order_are_read_on_demand(self) -> None:
        moved = self.moved(buffer_bytes=8192)
        model = Deep(4, False)
        expected = []
        for _ in range(3):
            x = inputs()
            expected.append(gradients(model, x, lambda x=x: model(x)))  # type: ignore[misc]
        losses, several = [], [inputs() for _ in range(3)]
        for x in several:
            torch.manual_seed(7)
            with moved:
                losses.append(model(x))
        for x, loss, wanted in zip(several, losses, expected, strict=True):  # first in, first out
            model.zero_grad()
            loss.backward()
            self.assertTrue(alike([x.grad, *(parameter.grad for parameter in model.parameters())], wanted))
        report = moved.report()
        self.assertEqual(report["live"], 0)
        self.assertGreaterEqual(report["on_demand"], 1, report)

    def test_gradient_checkpointing_of_transformers(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        tokens = torch.randint(0, 50, (2, 9))

        def run() -> list[torch.Tensor]:
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

        expected = run()
        for reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            moved = self.moved(min_bytes=2 * 9 * 32 * 4)
            handles = moved.attach(model)
            self.assertTrue(alike(run(), expected), reentrant)
            self.assertEqual((moved.report()["moved"], moved.report()["live"]), (3, 0), moved.report())
            for handle in handles:
                handle.remove()
            run()
            self.assertEqual(moved.report()["moved"], 3, "no longer attached")

    def test_bad_input_is_refused(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "no folder"):
            zeroth.offload_activations()
        with self.assertRaisesRegex(zeroth.Error, "/nowhere/at/all"):
            moved = zeroth.offload_activations("/nowhere/at/all")
            with moved:
                checkpoint(torch.sin, torch.zeros(4096).requires_grad_(), use_reentrant=False)
        with self.assertRaisesRegex(zeroth.Error, "no such engine of files.*tape"):
            self.moved(io="tape")
        with self.assertRaisesRegex(zeroth.Error, "no such way to move activations"):
            self.moved(saved="some")
        in_host = zeroth.offload_activations(device="cpu", saved="all", min_bytes=1)
        with in_host:
            torch.randn(9).requires_grad_().exp().sum().backward()
        self.assertEqual(in_host.report()["moved"], 0, "tensors of a CPU are in the memory of the host")
        self.assertGreater(in_host.report()["kept"], 0)


RESIDENT = 4 << 20


MMAP_THRESHOLD = -3
"""of mallopt(): larger blocks are given back to the system when they are freed"""


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Engines(job.RankTest):
    def test_files_reversible_blocks_and_tiles_at_every_stage(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.run_well(2, "activations_rank.py", folder, "same_bits", "planned", "pipeline", "reversible", "tiles")

    @tier.long
    def test_the_trainer_has_the_same_losses_with_all_saved_tensors_in_files(self) -> None:
        root = job.HERE.parents[1]
        text = ["--data", str(root / "python"), "--suffix", ".py", "--layers", "2", "--d-model", "64", "--seq", "64"]
        with tempfile.TemporaryDirectory() as folder:
            base = pathlib.Path(folder)
            activations = {"device": "nvme", "nvme_path": folder, "saved": "all", "buffer_bytes": 8 << 20}
            (base / "memory.json").write_text("{}")
            (base / "files.json").write_text(json.dumps({"zeroth": {"activations": activations}}))
            records = []
            for stage in (0, 3):
                for where in ("memory", "files"):
                    records.append(str(base / f"{where}{stage}"))
                    done = subprocess.run(
                        [job.RUN, "-n", "2", sys.executable, str(root / "examples/gpt/train.py"), *text, "--steps", "4",
                         "--eval-windows", "0", "--batch", "4", "--zero-stage", str(stage), "--json", records[-1],
                         "--config", str(base / f"{where}.json")],
                        capture_output=True, text=True, check=False, timeout=300,
                    )  # fmt: skip
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            done = subprocess.run(
                [sys.executable, str(root / "tools/compare-stages"), *records],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("is the same, bit for bit", done.stdout)


if __name__ == "__main__":
    tier.main()
