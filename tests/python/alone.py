"""An engine in a world of one, for tests: a model of the zoo, its configuration, a few steps."""

from __future__ import annotations

import torch
import zoo
from torch import nn

import zeroth

BATCH = (torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1]))


def config(stage: int = 3, **more: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **more}


def make(name: str = "plain", stage: int = 3) -> tuple[nn.Module, zeroth.Engine]:
    model = zoo.make(name)
    return model, zeroth.Engine(model, config(stage), log_level="off")


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


def train(engine: zeroth.Engine, steps: int = 1) -> zeroth.StepResult:
    for _ in range(steps):
        engine.backward(engine(*BATCH))
        result = engine.step()
    return result
