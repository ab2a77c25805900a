"""float16 with its loss scale, and models that are cast: beside plain torch, and at every stage with the same bits."""

from __future__ import annotations

import copy
import pathlib
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroth

STAGES = (0, 1, 2, 3)
Outcome = list[tuple[float, float, float, str]]


class Net(nn.Module):
    """Blocks, a head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.register_buffer("shift", torch.full((16,), 0.1))
        self.recompute: bool | None = None
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        if self.recompute:
            x.requires_grad_()  # else a reentrant checkpoint has no gradients
        for block in self.blocks:
            x = x + (block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        self.aside = x
        return self.head(x)


def config(stage: int, **fp16: Any) -> dict[str, Any]:
    scale = {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 1, **fp16}
    return {
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, **scale},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 16, generator=generator).half(), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(steps)
    ]


def train(
    stage: int,
    model: nn.Module | None = None,
    *,
    plain: bool = False,
    steps: int = 8,
    more: Callable[[zeroth.Engine, Any], torch.Tensor] | None = None,
    **fp16: Any,
) -> tuple[Outcome, dict[str, torch.Tensor]]:
    model = Net() if model is None else model
    engine = zeroth.Engine(model, config(stage, **fp16), log_level="off")
    outcome: Outcome = []
    for x, y in batches(steps):
        loss = F.cross_entropy(engine(x).float(), y)
        if more is not None:
            loss = loss + more(engine, model)
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
        result = engine.step()
        outcome.append((loss.item(), result.grad_norm, result.loss_scale, result.cause))
    engine.close()
    return outcome, {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


class Training(unittest.TestCase):
    def test_it_follows_torch_with_masters_in_float32(self) -> None:
        outcome, weights = train(2, loss_scale=1024)
        half = Net().half()
        masters = [parameter.detach().float().requires_grad_() for parameter in half.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=1e-2)
        for (x, y), (loss, norm, scale, cause) in zip(batches(8), outcome, strict=True):
            expected = F.cross_entropy(half(x).float(), y)
            self.assertAlmostEqual(loss, expected.item(), delta=2e-3 * expected.item())
            half.zero_grad()
            (1024 * expected).backward()
            for master, parameter in zip(masters, half.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float() / 1024
            total = torch.stack([master.grad.norm() for master in masters if master.grad is not None]).norm().item()
            self.assertAlmostEqual(norm, total, delta=2e-2 * total)
            self.assertEqual((scale, cause), (1024, ""))
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, half.parameters(), strict=True):
                    parameter.copy_(master)
        for name, parameter in half.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), atol=2e-3, rtol=2e-2)

    def test_every_stage_and_both_kinds_of_backward_have_the_same_bits(self) -> None:
        expected = train(0, initial_scale_power=20)
        causes = [cause for *_, cause in expected[0]]
        self.assertIn("overflow", causes)
        self.assertEqual(causes[-1], "")
        for stage in STAGES:
            for plain in (False, True):
                outcome, weights = train(stage, plain=plain, initial_scale_power=20)
                self.assertEqual(outcome, expected[0], (stage, plain))
                self.assertTrue(same(weights, expected[1]))

    def test_a_static_scale_of_a_power_of_two_is_not_in_the_numbers(self) -> None:
        (one, _), (other, _) = train(3, loss_scale=256), train(3, loss_scale=4096)
        for (loss, norm, *_), (other_loss, other_norm, *_) in zip(one, other, strict=True):
            self.assertAlmostEqual(loss, other_loss, delta=1e-3)
            self.assertAlmostEqual(norm, other_norm, delta=1e-3)

    def test_recomputed_blocks_have_the_scale_once(self) -> None:
        expected = train(3)
        for recompute in (False, True):
            for plain in (False, True):
                model = Net()
                model.recompute = recompute
                outcome, weights = train(3, model, plain=plain)
                self.assertEqual(outcome, expected[0], (recompute, plain))
                self.assertTrue(same(weights, expected[1]))

    def test_a_recomputed_model_has_the_scale_once(self) -> None:
        for reentrant in (False, True):
            norms = []
            for plain in (False, True):
                engine = zeroth.Engine(Net(), config(3), log_level="off")
                x, y = batches(1)[0]
                out = checkpoint(engine, x.clone().requires_grad_(), use_reentrant=reentrant)
                loss = F.cross_entropy(out.float(), y)
                loss.backward() if plain else engine.backward(loss)
                norms.append(engine.step().grad_norm)
            self.assertAlmostEqual(norms[0], norms[1], delta=1e-3)
            self.assertAlmostEqual(norms[0], train(3, steps=1)[0][0][1], delta=1e-3)

    def test_the_floor_ends_the_training_with_the_name(self) -> None:
        engine = zeroth.Engine(Net(), config(1, initial_scale_power=1, min_loss_scale=1.0), log_level="off")
        x, y = batches(1)[0]

        def step() -> zeroth.StepResult:
            engine.backward(F.cross_entropy(engine(x).float(), y) * float("inf"))
            return engine.step()

        result = step()
        self.assertEqual(
            (result.cause, result.committed, result.loss_scale, engine.loss_scale), ("overflow", False, 2, 1)
        )
        self.assertIn("non-finite gradient: parameter", result.reason)
        with self.assertRaisesRegex(zeroth.Error, r"(?s)NONFINITE.*smallest loss scale.*which: .*(blocks|head).*bf16"):
            step()


class Edges(unittest.TestCase):
    """What is around the module has no scale."""

    def test_inputs_and_parameters_around_the_engine_have_their_own_gradients(self) -> None:
        x, y = batches(1)[0]
        found = {}
        for kind in ("torch", "plain", "engine"):
            torch.manual_seed(5)
            before, after = nn.Linear(16, 16).half(), nn.Linear(4, 4)
            model: Any = Net().half() if kind == "torch" else zeroth.Engine(Net(), config(3), log_level="off")
            leaf = x.clone().requires_grad_()
            loss = F.cross_entropy(after(model(before(leaf)).float()), y)
            model.backward(loss) if kind == "engine" else loss.backward()
            found[kind] = [leaf.grad, before.weight.grad, after.weight.grad]
            self.assertTrue(leaf.is_leaf)
        for mine, theirs in zip(found["plain"], found["torch"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-2)
        for mine, theirs in zip(found["engine"], found["torch"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-2)

    def test_a_penalty_inside_gathered_has_the_scale(self) -> None:
        def penalty(engine: zeroth.Engine, model: Any) -> torch.Tensor:
            with engine.gathered(model.head.weight):
                return model.head.weight.float().square().sum()

        expected = train(0, more=penalty)
        self.assertNotEqual(expected[0], train(0)[0])
        for stage in (0, 3):
            self.assertEqual(train(stage, more=penalty)[0], expected[0])
            for one, other in zip(train(stage, more=penalty, plain=True)[0], expected[0], strict=True):
                self.assertAlmostEqual(one[0], other[0], delta=1e-3)
                self.assertAlmostEqual(one[1], other[1], delta=1e-3)

    def test_a_penalty_beside_it_is_refused_where_it_would_lack_the_scale(self) -> None:
        def penalty(engine: zeroth.Engine, model: Any) -> torch.Tensor:
            return model.head.weight.float().square().sum()

        train(0, more=penalty)
        with self.assertRaisesRegex(zeroth.Error, r"without the loss scale.*which: head\.weight.*engine\.gathered"):
            train(0, more=penalty, plain=True)

    def test_a_tensor_that_leaves_beside_the_outputs_is_refused_there_too(self) -> None:
        def aside(engine: zeroth.Engine, model: Any) -> torch.Tensor:
            return model.aside.float().square().mean()

        for stage in (0, 3):
            train(stage, more=aside)
            with self.assertRaisesRegex(zeroth.Error, "beside its outputs.*engine\\.backward"):
                train(stage, more=aside, plain=True)

    def test_an_inner_loss_beside_its_logits_has_the_scale_once(self) -> None:
        class WithLoss(Net):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
                logits = super().forward(x)
                return {"loss": F.cross_entropy(logits.float(), y), "logits": logits}

        for extra in (0.0, 1.0):
            norms = []
            for plain in (False, True):
                engine = zeroth.Engine(WithLoss(), config(2), log_level="off")
                out = engine(*batches(1)[0])
                loss = out["loss"] + extra * out["logits"].float().square().mean()
                loss.backward() if plain else engine.backward(loss)
                norms.append(engine.step().grad_norm)
            self.assertAlmostEqual(norms[0], norms[1], delta=1e-3)


class Casts(unittest.TestCase):
    def test_a_float32_model_is_cast_as_by_hand(self) -> None:
        for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            settings = {"zero_optimization": {"stage": 3}, key: {"enabled": True}}
            outcomes = []
            for by_hand in (False, True):
                model = Net().to(dtype) if by_hand else Net()
                engine = zeroth.Engine(model, settings, log_level="off")
                self.assertEqual({value.dtype for value in [*model.parameters(), *model.buffers()]}, {dtype})
                losses = []
                for x, y in batches(3):
                    loss = F.cross_entropy(engine(x.to(dtype)).float(), y)
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                outcomes.append(losses)
            self.assertEqual(*outcomes)

    def test_buffers_that_are_not_saved_keep_their_dtype(self) -> None:
        class Rotary(Net):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("inv_freq", 1.0 / 10000.0 ** torch.arange(0, 1, 0.25), persistent=False)

        for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            right = Rotary().inv_freq.clone()
            with tempfile.TemporaryDirectory() as folder:
                log = pathlib.Path(folder) / "log"
                model = Rotary()
                settings = {"zero_optimization": {"stage": 3}, key: {"enabled": True}}
                zeroth.Engine(model, settings, log_level="off", json_log=str(log))
                self.assertTrue(torch.equal(model.inv_freq, right))
                self.assertEqual((model.shift.dtype, model.head.weight.dtype), (dtype, dtype))
                text = log.read_text()
            self.assertRegex(text, r"cast to \w+16: \d+ parameters, 1 buffer; float32 stays in 1 buffer .*: inv_freq")

    def test_a_deferred_model_is_cast_as_it_is_made(self) -> None:
        for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            model = zeroth.deferred(Net)
            engine = zeroth.Engine(model, {"zero_optimization": {"stage": 3}, key: {"enabled": True}}, log_level="off")
            self.assertTrue(same(engine.state_dict(), Net().to(dtype).state_dict()))

    def test_inputs_are_cast_where_it_is_asked_for(self) -> None:
        x, _ = batches(1)[0]
        for key, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            for stage in (0, 3):
                section = {"enabled": True, "auto_cast": True}
                settings = {"zero_optimization": {"stage": stage}, key: section}
                engine = zeroth.Engine(Net(), settings, log_level="off")
                self.assertTrue(torch.equal(engine(x.float()), engine(x.to(dtype))))
                self.assertEqual(engine(x.double()).dtype, dtype)
                section["auto_cast"] = False
                with self.assertRaisesRegex(RuntimeError, "dtype"):
                    zeroth.Engine(Net(), settings, log_level="off")(x.float())
        idle = zeroth.Engine(Net(), {"fp16": {"enabled": False, "auto_cast": True}}, log_level="off")
        self.assertEqual(idle(x.float()).dtype, torch.float32)

    def test_what_the_user_has_cast_stays(self) -> None:
        model = Net().half()
        model.head.float()
        model.forward = lambda x: model.head(model.blocks[0](x).float())  # type: ignore[method-assign]
        engine = zeroth.Engine(model, config(2), log_level="off")
        x, y = batches(1)[0]
        engine.backward(F.cross_entropy(engine(x), y))
        self.assertTrue(engine.step().committed)
        self.assertEqual(model.head.weight.dtype, torch.float32)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        cases: list[tuple[nn.Module, dict[str, Any], str]] = [
            (
                Net(),
                {"fp16": {"enabled": True}, "zeroth": {"cast": False}},
                r"fp16\.enabled.*got: float32.*zeroth\.cast",
            ),
            (Net().bfloat16(), {"fp16": {"enabled": True}}, "another dtype.*which: blocks.0.0.weight.*got: bfloat16"),
            (Net().half(), {"bf16": {"enabled": True}}, "another dtype.*got: float16"),
            (
                Net().half(),
                {},
                r"no loss scale is configured.*which: blocks.0.0.weight.*fp16.*model\.to\(torch\.bfloat16\)",
            ),
            (Net(), {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
            (Net(), {"fp16": {"enabled": True}, "zeroth": {"memory_limit_bytes": 1}}, "OUT_OF_MEMORY"),
        ]
        for model, settings, expected in cases:
            before = copy.deepcopy(model.state_dict())
            with self.assertRaisesRegex(zeroth.Error, f"(?s){expected}"):
                zeroth.Engine(model, settings, log_level="off")
            after = model.state_dict()
            self.assertTrue(same(before, after))
            self.assertEqual([value.dtype for value in before.values()], [value.dtype for value in after.values()])


class OtherKinds(unittest.TestCase):
    """Parameters that are no plain floats, and gradients that are not dense, beside torch."""

    def train(self, stage: int | None, make: Callable[[], nn.Module], x: torch.Tensor) -> tuple[list[float], Any]:
        torch.manual_seed(3)
        model = make()
        engine = None
        if stage is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            settings = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            engine = zeroth.Engine(model, settings, log_level="off")
        losses = []
        for _ in range(5):
            loss = model(x).abs().square().mean()
            loss.backward()
            if engine is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.step()
            losses.append(loss.item())
        return losses, engine if engine is not None else model

    def test_complex_parameters_are_pairs_of_reals(self) -> None:
        for dtype, real in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):

            def make(dtype: torch.dtype = dtype) -> nn.Module:
                return nn.Sequential(*(nn.Linear(6, 6, dtype=dtype) for _ in range(3)))

            x = torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(1))
            expected, plain = self.train(None, make, x)
            for stage in STAGES:
                losses, engine = self.train(stage, make, x)
                for mine, theirs in zip(losses, expected, strict=True):
                    self.assertAlmostEqual(mine, theirs, delta=1e-5 * abs(theirs) + 1e-7)
                weight = engine.full("1.weight")
                self.assertEqual((weight.dtype, weight.shape), (dtype, (6, 6)))
                self.assertEqual(engine.full("1.weight", "exp_avg").dtype, dtype)
                self.assertEqual(next(iter(engine.local("exp_avg").values())).tensor.dtype, real)
                torch.testing.assert_close(weight, plain[1].weight.detach(), atol=1e-4, rtol=1e-3)
                again = {name: value * 2 for name, value in engine.state_dict().items()}
                engine.load_state_dict(again)
                self.assertTrue(torch.equal(engine.full("1.weight"), again["1.weight"]))
                engine.close()

    def test_sparse_gradients_become_dense(self) -> None:
        x = torch.tensor([[1, 2, 2], [5, 1, 0]])
        for dtype in (torch.float64, torch.bfloat16):

            def make(sparse: bool = True, dtype: torch.dtype = dtype) -> nn.Module:
                return nn.Sequential(nn.Embedding(8, 4, sparse=sparse, dtype=dtype), nn.Linear(4, 4, dtype=dtype))

            for stage in (0, 3):
                self.assertEqual(self.train(stage, make, x)[0], self.train(stage, lambda: make(sparse=False), x)[0])


class Large(unittest.TestCase):
    """Parameters whose last byte is the last of their memory."""

    def test_a_cast_reads_what_it_has_written(self) -> None:
        for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(1 << 15, 64))
            expected = {name: value.to(dtype) for name, value in model.state_dict().items()}
            settings = {key: {"enabled": True}, "zero_optimization": {"stage": 3}}
            engine = zeroth.Engine(model, settings, log_level="off")
            for name, value in expected.items():
                got = engine.full(name)
                assert got is not None
                self.assertTrue(torch.equal(got.to(dtype), value), name)
            engine.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
