"""One rank of two that train lists of layers of unusual kinds in stages; see pipe_test.py. Losses and weights are those
of one process, in float64.

pipe_values_rank.py CASE...
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import cases
import torch
from pipe_list_cases import skips
from pipe_models import CLASSES, WIDTH, pairs
from torch import nn
from torch.nn import functional as F

import zeroth
from zeroth import pipe

STEPS, MICRO, RATE = 2, 3, 0.5


def world() -> zeroth.World:
    return zeroth.World.from_environment()


def config(schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": MICRO,
        "zeroth": {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "split": "uniform"}},
        **more,
    }


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return pairs(*(2 + (step + number) % 3 for number in range(MICRO)))


def alone(layers: nn.Sequential) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process."""
    layers = copy.deepcopy(layers)
    optimizer = torch.optim.SGD(layers.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for value, labels in batches(step):
            with pipe.stashing():
                for layer in layers:
                    value = pipe.layer_list.call_layer(layer, value)
            loss = F.cross_entropy(value, labels) / MICRO
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, layers.state_dict()


def require_same(layers: nn.Sequential, schedule: str, *, deferred: int, whole: int) -> None:
    """`deferred`, `whole`: parameters of all ranks whose gradients W computes, and that I does, in I and W of a
    micro-batch."""
    losses, weights = alone(layers)
    pipelined = zeroth.pipeline(layers, config(schedule), world=world(), loss_fn=F.cross_entropy)
    engine = zeroth.Engine(pipelined.model, config(schedule), world=world(), log_level="warning")
    for step, expected in enumerate(losses):
        _, loss = engine.train_batch(batches(step))
        assert abs(loss - expected) < 1e-12, (schedule, step, loss, expected)
    report = engine._pipeline.core.report()  # type: ignore[union-attr]
    counts = torch.tensor([report["weights_deferred"], report["weights_whole"]], dtype=torch.float64)
    found = [int(engine.average(float(count)) * world().size / (STEPS * MICRO)) for count in counts]
    assert found == [deferred, whole], (schedule, found)
    for name, value in engine.state_dict(ranks=None).items():
        assert (value - weights[name]).abs().max() < 1e-12, (schedule, name)
    engine.close(keep_parameters=False)


class Begin(nn.Linear):
    """A dict with a tuple, a plain value, and a tensor without a gradient."""

    def __init__(self) -> None:
        super().__init__(4, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"pair": (y, [y.square(), 3]), "mask": x[:, :1] > 0, "name": "first"}


class Middle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        y, (square, factor) = values["pair"]
        y = torch.where(values["mask"], super().forward(y), y)
        return {**values, "pair": (y, [square * factor / 4, factor + 1]), "name": values["name"] + "!"}


class End(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)

    def forward(self, values: dict[str, Any]) -> torch.Tensor:
        y, (square, _) = values["pair"]
        assert values["name"] == "first!!"
        return super().forward(y + square)


def dicts() -> None:
    """Gradients pass through what is nested, over ranks and past chunks."""
    for schedule, counts in (("1f1b", (0, 0)), ("zb-v", (8, 0))):
        torch.manual_seed(4)
        layers = nn.Sequential(Begin(), Middle(), Middle(), End()).double()
        require_same(layers, schedule, deferred=counts[0], whole=counts[1])


def stashes() -> None:
    """Skip connections from one rank to another, and with four chunks past one."""
    products = 2 * sum(isinstance(module, nn.Linear) for layer in skips() for module in layer.modules())
    others = sum(1 for layer in skips() for _ in layer.parameters()) - products
    for schedule, counts in (("1f1b", (0, 0)), ("zb-v", (products, others))):
        require_same(nn.Sequential(*skips()), schedule, deferred=counts[0], whole=counts[1])


class Image(nn.Module):
    """A convolution without an input gradient, if it is the first layer, and one with."""

    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3, padding=1)
        self.back = nn.Conv1d(3, 1, 1, bias=False)
        self.hooked = hooked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels = self.convolution(x[:, None])
        if self.hooked and channels.requires_grad:
            channels.register_hook(lambda gradient: gradient * 2)
        return x + self.back(torch.tanh(channels))[:, 0]


def convolutions() -> None:
    """In two parts; one with a hook on its output is computed whole."""
    for hooked in (False, True):
        torch.manual_seed(6)
        layers = nn.Sequential(Image(hooked), nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
        moved = 2 if hooked else 0
        require_same(layers.double(), "zb-h1", deferred=7 - moved, whole=2 + moved)


class Overflows(nn.Linear):
    """A gradient of the second step that fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.calls += 1
        if MICRO < self.calls <= 2 * MICRO:
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def overflow() -> None:
    """On one stage: all stages skip the step, and the next one has half the scale."""
    for guilty in range(2):
        torch.manual_seed(8)
        middle = [Overflows(), nn.Linear(WIDTH, WIDTH)] if guilty == 0 else [nn.Linear(WIDTH, WIDTH), Overflows()]
        layers = nn.Sequential(nn.Linear(4, WIDTH), *middle, nn.Linear(WIDTH, CLASSES))
        half = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
        settings = config("1f1b", **half)
        zeroth.pipeline(layers, settings, world=world(), loss_fn=lambda y, labels: F.cross_entropy(y.float(), labels))
        engine = zeroth.Engine(layers, settings, world=world(), log_level="error")
        committed, scales, weights = [], [], []
        for step in range(3):
            result, _ = engine.train_batch([(x.half(), labels) for x, labels in batches(step)])
            committed.append(result.committed)
            scales.append(result.loss_scale)
            weights.append({name: value.clone() for name, value in engine.state_dict(ranks=None).items()})
        assert committed == [True, False, True], (guilty, committed)
        assert scales == [256.0, 256.0, 128.0], (guilty, scales)
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items()), guilty
        assert not all(torch.equal(value, weights[2][name]) for name, value in weights[0].items()), guilty
        engine.close(keep_parameters=False)


def main() -> None:
    cases.run(globals(), sys.argv[1:])


if __name__ == "__main__":
    main()
