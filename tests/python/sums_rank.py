"""One rank of four: in which order gradients are summed, told by numbers that have another sum in each order: 2^24 + 1
is 2^24 in float32, on every machine. See order_of_sums()."""

from __future__ import annotations

import torch
from torch import nn

import zeroth

LARGE = 2.0**24
MICRO_STEPS = 2
GRADIENTS = {0: (LARGE, 1.0), 2: (-LARGE, 1.0)}
"""of a rank of each pair, in each micro-step; 0 on the others"""
OVER_ALL_RANKS_FIRST, OVER_MICRO_STEPS_OF_PAIRS_FIRST = 2.0, 1.0
"""(2^24 - 2^24) + (1 + 1), and (2^24 + 1) + (-2^24 + 1)"""


class Scale(nn.Module):
    """The gradient of its weight is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def order_of_sums(world: zeroth.World, plan: dict[str, object], **own: object) -> float:
    """Sum of GRADIENTS over ranks and micro-steps."""
    model = Scale()
    config = {
        "zero_optimization": plan,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_accumulation_steps": MICRO_STEPS,
        "zeroth": {"timeout_ms": 20_000, **own},
    }
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    for micro_step in range(MICRO_STEPS):
        gradient = GRADIENTS.get(world.rank, (0.0, 0.0))[micro_step]
        engine.backward(engine(torch.full((8,), gradient)))
        engine.step()
    engine.close()
    assert len(set(model.weight.tolist())) == 1, model.weight
    return -float(model.weight[0].item()) * world.size * MICRO_STEPS
