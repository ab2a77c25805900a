"""Where the loss scale of float16 is in a graph: calls of engines in any order, beside plain torch in float64.

Gradients in float16 are near those in float64; a missing or doubled scale of 128 is not.
"""

from __future__ import annotations

import copy
import random
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import tier
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth

SCALE = 128.0
FIRST = ("parts.0.weight", "parts.0.bias")
Kind = str
"""of the backward: "engine" (the first engine's), "plain" (of the loss)"""


class Parts(nn.Module):
    """Parts that a script calls one by one."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, part: int = 0) -> torch.Tensor:
        return torch.tanh(self.parts[part](x))


class Closure(Parts):
    """Takes a tensor from elsewhere than its arguments."""

    beside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, part: int = 0) -> torch.Tensor:
        return super().forward(x + self.beside, part)


def config(stage: int, half: str = "fp16", scale: float = SCALE) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        half: {"enabled": True, **({"loss_scale": scale} if half == "fp16" else {})},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }


def engine_of(model: nn.Module, stage: int, half: str = "fp16", scale: float = SCALE) -> zeroth.Engine:
    return zeroth.Engine(model, config(stage, half, scale), log_level="off")


def near(test: unittest.TestCase, mine: torch.Tensor, theirs: torch.Tensor, what: Any, within: float = 0.03) -> None:
    difference = (mine.double() - theirs).norm().item()
    test.assertLessEqual(difference, within * theirs.norm().item() + 2e-4, what)


def x_of(seed: int = 3) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Chain:
    """A program drawn from a seed: calls of parts of two models, sums, an outside layer, leaves. The same program runs
    on engines and on plain models in float64."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.steps: list[tuple[str, int, int, int]] = []
        for at in range(draw.randint(4, 9)):
            kind = draw.choice(["call", "call", "call", "other", "add", "outside", "again"])
            self.steps.append((kind, draw.randrange(at + 1), draw.randrange(at + 1), draw.randrange(3)))
        self.ends = sorted({len(self.steps), *(draw.randrange(1, len(self.steps) + 1) for _ in range(2))})

    def loss(self, one: Any, other: Any, outside: nn.Module, leaf: torch.Tensor) -> torch.Tensor:
        values = [leaf]
        for kind, first, second, part in self.steps:
            x, y = values[first], values[second]
            if kind == "call":
                values.append(one(x, part))
            elif kind == "other":
                values.append(other(x, part))
            elif kind == "add":
                values.append(x + 0.5 * y)
            elif kind == "outside":
                values.append(torch.tanh(outside(x)))
            else:
                values.append(checkpoint(one, x, part, use_reentrant=False))
        return sum(
            (values[end].to(torch.float64).square().mean() for end in self.ends), torch.zeros((), dtype=torch.float64)
        )


class Chains(unittest.TestCase):
    def check(self, seed: int, kind: Kind, stage: int) -> None:
        chain = Chain(seed)
        torch.manual_seed(9)
        outside = nn.Linear(8, 8).half()
        one, other = Parts(1), Parts(2)
        plain = [copy.deepcopy(model).half().double() for model in (one, other)]
        engines = [engine_of(one, stage), engine_of(other, stage, scale=SCALE * 16)]
        outside_64 = copy.deepcopy(outside).double()
        leaf = x_of().half().requires_grad_()
        leaf_64 = leaf.detach().double().requires_grad_()
        chain.loss(plain[0], plain[1], outside_64, leaf_64).backward()
        loss = chain.loss(engines[0], engines[1], outside, leaf)
        engines[0].backward(loss) if kind == "engine" else loss.backward()
        what = (seed, kind, stage, chain.steps, chain.ends)
        for engine, model in zip(engines, plain, strict=True):
            for name, parameter in model.named_parameters():
                mine = engine.full(name, "grad")
                if parameter.grad is None:
                    self.assertTrue(mine is None or not mine.any(), (what, name))
                else:
                    assert mine is not None, (what, name)
                    near(self, mine, parameter.grad, (what, name))
            engine.close()
        assert leaf.grad is not None and leaf_64.grad is not None
        near(self, leaf.grad, leaf_64.grad, (what, "leaf"))
        for mine, parameter in zip(outside.parameters(), outside_64.parameters(), strict=True):
            if parameter.grad is not None:
                assert mine.grad is not None
                near(self, mine.grad, parameter.grad, (what, "outside"))

    def of_seeds(self, seeds: range) -> None:
        for seed in seeds:
            self.check(seed, "engine" if seed % 2 else "plain", (0, 3)[seed // 2 % 2])

    def test_drawn_chains_of_calls(self) -> None:
        self.of_seeds(range(24))

    @tier.long
    def test_more_drawn_chains_of_calls(self) -> None:
        self.of_seeds(range(24, 600))


class Loops(unittest.TestCase):
    """What scripts do, each at stages 0 and 3."""

    def both(self, body: Callable[[int, Kind], None]) -> None:
        for stage in (0, 3):
            for kind in ("engine", "plain"):
                with self.subTest(stage=stage, backward=kind):
                    body(stage, kind)

    def compare(self, engine: zeroth.Engine, model: nn.Module, within: float = 0.03, names: Sequence[str] = ()) -> None:
        """Gradients of these parameters, or of all."""
        for name in names or [name for name, _ in model.named_parameters()]:
            mine, theirs = engine.full(name, "grad"), model.get_parameter(name).grad
            assert mine is not None and theirs is not None, name
            near(self, mine, theirs, name, within)

    def test_inputs_that_are_embeddings_of_the_model_itself(self) -> None:
        class Embedded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(2)
                self.embedding = nn.Embedding(16, 8)
                self.body = nn.Linear(8, 8)

            def forward(self, ids: Any = None, inputs_embeds: Any = None) -> torch.Tensor:
                x = self.embedding(ids) if inputs_embeds is None else inputs_embeds
                return torch.tanh(self.body(x))

        def body(stage: int, kind: Kind) -> None:
            model = Embedded()
            plain = copy.deepcopy(model).half().double()
            engine = zeroth.Engine(model, {**config(stage), "zeroth": {}}, log_level="off")
            ids = torch.arange(8) % 5
            plain(inputs_embeds=plain.embedding(ids) * 2).square().mean().backward()
            if stage == 3:
                with engine.gathered(model.embedding):
                    embedded = model.embedding(ids)
            else:
                embedded = model.embedding(ids)
            loss = engine(inputs_embeds=embedded * 2).double().square().mean()
            if kind == "plain" and stage == 0:
                with self.assertRaisesRegex(zeroth.Error, r"without the loss scale.*embedding"):
                    loss.backward()
                return
            engine.backward(loss) if kind == "engine" else loss.backward()
            self.compare(engine, plain)
            engine.close()

        self.both(body)

    def test_two_engines_and_a_frozen_critic(self) -> None:
        def body(stage: int, kind: Kind) -> None:
            generator, critic = Parts(1), Parts(2)
            plain = [copy.deepcopy(model).half().double() for model in (generator, critic)]
            first, second = engine_of(generator, stage), engine_of(critic, stage, scale=1024.0)
            critic.requires_grad_(False)
            plain[1].requires_grad_(False)
            x = x_of()
            plain[1](plain[0](x.half().double())).square().mean().backward()
            loss = second(first(x.half())).double().square().mean()
            first.backward(loss) if kind == "engine" else loss.backward()
            self.compare(first, plain[0], names=FIRST)
            result = first.step()
            self.assertTrue(result.committed)
            first.close()
            second.close()

        self.both(body)

    def test_a_bfloat16_engine_and_a_layer_outside_get_no_scale(self) -> None:
        def body(stage: int, kind: Kind) -> None:
            one, other = Parts(1), Parts(2)
            plain = [copy.deepcopy(one).half().double(), copy.deepcopy(other).bfloat16().double()]
            first, second = engine_of(one, stage), engine_of(other, stage, "bf16")
            torch.manual_seed(4)
            head = nn.Linear(8, 8, dtype=torch.float64)
            plain_head = copy.deepcopy(head)
            x = x_of()
            plain_head(plain[1](plain[0](x))).square().mean().backward()
            loss = head(second(first(x.half()).bfloat16()).double()).square().mean()
            first.backward(loss) if kind == "engine" else loss.backward()
            for engine, model in ((first, plain[0]), (second, plain[1])):
                self.compare(engine, model, 0.05, FIRST)
            assert head.weight.grad is not None and plain_head.weight.grad is not None
            near(self, head.weight.grad, plain_head.weight.grad, "head", 0.05)
            first.close()
            second.close()

        self.both(body)

    def test_gradients_that_torch_returns(self) -> None:
        """torch.autograd.grad() by parameters, and a penalty on it."""

        def body(stage: int, kind: Kind) -> None:
            model = Parts()
            plain = copy.deepcopy(model).half().double()
            engine = engine_of(model, stage)
            x = x_of()
            found = []
            for call, weights in ((engine, model.parts[0]), (plain, plain.parts[0])):
                half = call is engine
                loss = call(x.half() if half else x.half().double()).double().square().mean()
                (only,) = torch.autograd.grad(loss, [weights.weight], retain_graph=True)
                (grad,) = torch.autograd.grad(loss, [weights.weight], create_graph=True)
                penalty = grad.double().square().sum() * 100
                found.append((only, grad.detach(), penalty.detach()))
                total = loss + penalty
                if half and kind == "engine":
                    engine.backward(total)
                else:
                    total.backward()
            for mine, theirs in zip(*found, strict=True):
                near(self, mine, theirs, "returned")
            self.compare(engine, plain, 0.05, FIRST)
            engine.close()

        self.both(body)

    def test_a_gradient_penalty_by_a_leaf(self) -> None:
        """As WGAN-GP: an input that is a leaf, also used outside."""

        def body(stage: int, kind: Kind) -> None:
            model = Parts()
            plain = copy.deepcopy(model).half().double()
            engine = engine_of(model, stage)
            gradients = []
            for call in (engine, plain):
                half = call is engine
                x = x_of().half()
                x = (x if half else x.double()).requires_grad_()
                out = call(x).double().sum()
                (grad,) = torch.autograd.grad(out, x, create_graph=True)
                penalty = (grad.double().flatten(1).norm(dim=1) - 1).square().mean()
                total = penalty + 0.1 * out
                if half and kind == "engine":
                    engine.backward(total)
                else:
                    total.backward()
                assert x.grad is not None
                gradients.append((grad.detach(), x.grad))
            for mine, theirs in zip(*gradients, strict=True):
                near(self, mine, theirs, "by the leaf")
            self.compare(engine, plain, 0.05, FIRST)
            engine.close()

        self.both(body)

    def test_a_reentrant_checkpoint_around_the_engine_between_other_calls(self) -> None:
        def body(stage: int, kind: Kind) -> None:
            model = Parts()
            plain = copy.deepcopy(model).half().double()
            engine = engine_of(model, stage)
            x = x_of().half()
            plain(plain(plain(x.double(), 0), 1), 2).square().mean().backward()
            middle = checkpoint(engine, engine(x, 0), 1, use_reentrant=True)
            loss = engine(middle, 2).double().square().mean()
            engine.backward(loss) if kind == "engine" else loss.backward()
            self.compare(engine, plain)
            engine.close()

        self.both(body)

    def test_forces_inside_of_the_forward(self) -> None:
        """A model that takes a gradient by an input of its own, and one block of it is computed again."""

        class Forces(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(2)
                self.body = nn.Linear(8, 8)

            def forces(self, at: torch.Tensor) -> torch.Tensor:
                at = at.detach().requires_grad_()
                energy = torch.tanh(self.body(at)).sum()
                (force,) = torch.autograd.grad(energy, at, create_graph=True)
                return force

            def forward(self, at: torch.Tensor, again: bool) -> torch.Tensor:
                return checkpoint(self.forces, at, use_reentrant=False) if again else self.forces(at)

        for again in (False, True):

            def body(stage: int, kind: Kind, again: bool = again) -> None:
                model = Forces()
                plain = copy.deepcopy(model).half().double()
                engine = engine_of(model, stage)
                x = x_of().half()
                plain(x.double(), again).square().mean().backward()
                loss = engine(x, again).double().square().mean()
                engine.backward(loss) if kind == "engine" else loss.backward()
                self.compare(engine, plain, 0.05, ["body.weight"])
                engine.close()

            self.both(body)

    def test_what_cannot_have_the_right_level_is_refused_by_name(self) -> None:
        for stage in (0, 3):
            for leaf in (False, True):
                model = Closure()
                engine = engine_of(model, stage)
                outer = x_of(4).half().requires_grad_()
                model.beside = outer if leaf else outer * 2
                loss = engine(x_of().half()).double().square().mean()
                if leaf:
                    with self.assertRaisesRegex(zeroth.Error, r"with the loss scale and without it.*x \* 1"):
                        (loss + outer.double().sum()).backward()
                else:
                    with self.assertRaisesRegex(zeroth.Error, "would leave the model with the loss scale.*argument"):
                        loss.backward()
                engine.close()

    def test_a_leaf_at_two_levels_is_refused_while_another_engine_runs_the_backward(self) -> None:
        for stage in (0, 3):
            model = Closure()
            first, second = engine_of(Parts(1), stage), engine_of(model, stage, scale=2048.0)
            model.beside = x_of(4).half().requires_grad_()
            loss = second(x_of().half()).double().square().mean() + model.beside.double().sum()
            with self.assertRaisesRegex(zeroth.Error, "with the loss scale and without it"):
                first.backward(loss)  # no part of the loss is its own
            first.close()
            second.close()

    def test_a_plain_leaf_of_a_closure_has_its_own_gradient(self) -> None:
        def body(stage: int, kind: Kind) -> None:
            model = Closure()
            plain = copy.deepcopy(model).half().double()
            engine = engine_of(model, stage)
            leaf = x_of(4).half().requires_grad_()
            plain.beside = leaf.detach().double().requires_grad_()
            model.beside = leaf
            plain(x_of().half().double()).square().mean().backward()
            loss = engine(x_of().half()).double().square().mean()
            engine.backward(loss) if kind == "engine" else loss.backward()
            assert leaf.grad is not None and plain.beside.grad is not None
            near(self, leaf.grad, plain.beside.grad, "leaf")
            engine.close()

        self.both(body)


if __name__ == "__main__":
    tier.main()
