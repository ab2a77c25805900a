"""What stands between the user's code and torch in a forward: autocast and torch.compile work as without an engine, and
of our package only what the boundaries of units need is called; nothing in a backward.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import pathlib
import sys
import threading
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tier
import torch
import zoo
from alone import BATCH, config, make
from torch import nn
from torch._dynamo.utils import counters

import zeroth

STEPS = 4
LR = 2.0**-4
"""a power of two: lr times a gradient is exact, so SGD rounds once, here and in torch"""

Training = tuple[list[float], list[torch.Tensor]]
"""losses and parameters"""


class Autocast(unittest.TestCase):
    """In float32 under torch.autocast, with the bits of plain torch."""

    x, y = BATCH[0].float(), BATCH[1]

    def trained_by_torch(self, name: str) -> Training:
        model = zoo.make(name, torch.float32)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        losses = []
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(self.x, self.y)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses, list(model.parameters())

    def trained_by_zeroth(self, name: str, stage: int, one_region: bool) -> Training:
        """`one_region` around all steps: its cache of casts must not outlive an update. Else one around each
        forward."""
        model = zoo.make(name, torch.float32)
        engine = zeroth.Engine(model, config(stage, optimizer={"type": "SGD", "params": {"lr": LR}}), log_level="off")

        def region(around_all: bool) -> contextlib.AbstractContextManager[object]:
            return torch.autocast("cpu", torch.bfloat16) if around_all == one_region else contextlib.nullcontext()

        losses = []
        with region(True):
            for _ in range(STEPS):
                with region(False):
                    loss = engine(self.x, self.y)
                losses.append(loss.item())
                engine.backward(loss)
                self.assertTrue(engine.step().committed)
        engine.close()
        return losses, list(model.parameters())

    @tier.both
    def test_every_model_has_the_bits_of_torch(self) -> None:
        ways = ((0, True), (3, True), (3, False))
        every = list(itertools.product(zoo.MODELS, ways))
        few = [(name, ways[number % len(ways)]) for number, name in enumerate(zoo.MODELS)]
        by_torch = functools.cache(self.trained_by_torch)
        for name, (stage, one_region) in tier.rows(every, few):
            with self.subTest(name, stage=stage, one_region=one_region):
                expected_losses, expected = by_torch(name)
                self.assertGreater(abs(expected_losses[-1] - expected_losses[0]), 1e-3, "nothing is trained")
                losses, parameters = self.trained_by_zeroth(name, stage, one_region)
                self.assertEqual(losses, expected_losses)
                self.assertTrue(
                    all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, expected, strict=True))
                )

    def test_the_region_is_seen(self) -> None:
        model = nn.Linear(1, 1, bias=False)
        fine = 1 + 2.0**-12  # which bfloat16 does not have
        nn.init.constant_(model.weight, fine)
        engine = zeroth.Engine(model, config(), log_level="off")
        self.assertEqual(engine(torch.ones(1, 1)).item(), fine)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(engine(torch.ones(1, 1)).item(), 1.0)


class Compiled(unittest.TestCase):
    """torch.compile of the whole module and of its blocks. A graph ends where a unit begins or ends, so fullgraph=True
    is for the inside of a unit."""

    def setUp(self) -> None:
        self.enterContext(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace")  # our hooks, which is how a graph ends
        self.addCleanup(torch._dynamo.reset)

    def losses(
        self, name: str, stage: int, change: Callable[[nn.Module], nn.Module] | None, before: bool = True
    ) -> list[float]:
        """`change` gives the module to be called, in whose place it puts compiled ones; before the engine is built, or
        after it."""
        torch._dynamo.reset()
        counters.clear()
        called = model = zoo.make(name)
        if change is not None and before:
            called = model = change(model)
        engine = zeroth.Engine(model, config(stage), log_level="off")
        if change is not None and not before:
            called = change(model)
        losses = []
        compiled = []
        for _ in range(STEPS):
            loss = called(*BATCH)
            losses.append(loss.item())
            engine.backward(loss)
            self.assertTrue(engine.step().committed)
            compiled.append(counters["stats"]["unique_graphs"])
        self.assertEqual(compiled[0] > 0, change is not None)
        self.assertEqual(len(set(compiled)), 1, "a later step was compiled anew")
        engine.close()
        return losses

    @tier.both
    def test_losses_are_those_without(self) -> None:
        def whole(model: nn.Module) -> nn.Module:
            return torch.compile(model, backend="eager")

        def blocks(model: nn.Module) -> nn.Module:
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
            return model

        def blocks_in_place(model: nn.Module) -> nn.Module:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="eager", fullgraph=True)
            return model

        expected = functools.cache(lambda stage: self.losses("plain", stage, None))
        every = list(itertools.product((0, 3), (whole, blocks, blocks_in_place), (True, False)))
        for stage, change, before in tier.rows(
            every, [(0, whole, True), (3, blocks, False), (3, blocks_in_place, True)]
        ):
            with self.subTest(stage=stage, change=change.__name__, before=before):
                self.assertEqual(self.losses("plain", stage, change, before), expected(stage))

    @tier.both
    def test_the_backward_may_be_compiled_with_it(self) -> None:
        # Not by compiled autograd, which takes the place of torch's engine, but as one node a graph.
        for name in tier.rows(("nested", "checkpoint", "normed", "slots"), ("nested",)):
            with self.subTest(name):
                expected = self.losses(name, 3, None)
                self.assertEqual(
                    self.losses(name, 3, lambda model: torch.compile(model, backend="aot_eager")), expected
                )


class Calls(unittest.TestCase):
    """Of our package, what Python calls while a profiler looks on: functions, and C functions that Python calls by
    themselves."""

    package = str(pathlib.Path(zeroth.__file__).parent)

    @contextlib.contextmanager
    def calls(self) -> Iterator[collections.Counter[str]]:
        """By name, on every thread that Python knows."""
        counts: collections.Counter[str] = collections.Counter()

        def look(frame: types.FrameType, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(self.package):
                counts[frame.f_code.co_name] += 1
            if event == "c_call" and str(getattr(arg, "__module__", None)).startswith("zeroth"):
                counts[arg.__name__] += 1

        threading.setprofile(look)
        sys.setprofile(look)
        try:
            yield counts
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def test_units_call_before_and_after_in_forward_and_nothing_in_backward(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            units = len(zeroth.units(model))
            # The root's begin is a functools.partial around a C function, which Python does not call by itself.
            boundaries = {"before": units - 1, "after": units}
            for _ in range(2):
                with self.calls() as in_forward:
                    loss = model(*BATCH)
                with self.calls() as in_backward:
                    loss.backward()
                self.assertEqual((in_forward, in_backward), (boundaries, {}))
                self.assertTrue(engine.step().committed)
            with self.calls() as in_forward:
                loss = engine(*BATCH)
            with self.calls() as in_backward:
                engine.backward(loss)
            self.assertEqual(in_forward, boundaries | {"__call__": 1})
            self.assertEqual(in_backward, {"backward": 1, "open_backward": 1, "close_backward": 1})

    def test_every_run_of_a_unit_calls_twice(self) -> None:
        for name in zoo.MODELS:
            model, _ = make(name)
            runs = []
            for unit in zeroth.units(model):
                module = model if unit.name == "root" else model.get_submodule(unit.name)
                # noqa: B023
                module.register_forward_hook(lambda module, args, output: runs.append(module), always_call=True)
            with self.calls() as in_forward:
                loss = model(*BATCH)
            runs_of_forward = len(runs)
            with self.calls() as in_backward:
                loss.backward()
            again = len(runs) - runs_of_forward  # by checkpoints around units
            with self.subTest(name, forward=in_forward, backward=in_backward):
                for counts in (in_forward, in_backward):
                    for inside in ("parts", "<listcomp>"):  # of objects that are no tuples, lists or dictionaries
                        del counts[inside]
                self.assertEqual(in_forward, {"before": runs_of_forward - 1, "after": runs_of_forward})
                self.assertEqual(in_backward, {"before": again, "after": again} if again else {})
                self.assertEqual(again > 0, name in ("checkpoint", "checkpoint_reentrant", "partly_used"))

    def test_a_function_of_ours_in_backward_would_be_seen(self) -> None:
        model, engine = make()
        model.head.weight.register_hook(lambda grad: engine._core.reset_counters())
        model.head.bias.register_hook(lambda grad: engine.train() and None)
        loss = model(*BATCH)
        with self.calls() as in_backward:
            loss.backward()
        self.assertEqual(in_backward, {"reset_counters": 1, "train": 1})


if __name__ == "__main__":
    tier.main()
