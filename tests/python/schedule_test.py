"""Learning-rate schedules of the configuration through the Python engine: rates and weights are those of torch with its
schedulers.

Where torch has the same curve its own schedulers are used, elsewhere a LambdaLR over factor(): update t, from 0,
follows iteration t - 1 of DeepSpeed's schedulers, which step after the optimizer.
"""

from __future__ import annotations

import itertools
import math
import unittest
from collections.abc import Callable
from typing import Any

import tier
import torch
import zoo
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

import zeroth

LR = 0.02
"""of the optimizer, or warmup_max_lr where the schedule has it"""
STEPS = 12
TOLERANCE = 1e-12
BATCH = (torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 3, 1]))

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def factor(
    t: int, kind: str, warmup: int, start: float = 0.0, log: bool = True, total: int = 0, floor: float = 0.0
) -> float:
    """Part of the full rate in update t: include/zeroth/optim/schedule.h."""
    width = max(2, warmup) if warmup else 0
    last = t - 1
    if last < width:
        if last < 0 or not width:
            return start if width else 1.0
        return start + (1 - start) * (math.log(last + 1) / math.log(width) if log else last / width)
    if kind == "WarmupLR":
        return 1.0
    if kind == "WarmupDecayLR":
        return min(1.0, max(0.0, (total - last) / (total - width)))
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, (last - width + 1) / (total - width)))) / 2


def by_formula(kind: str, warmup: int, **more: Any) -> Make:
    return lambda optimizer: schedulers.LambdaLR(optimizer, lambda t: factor(t, kind, warmup, **more))


def one_after_another(*parts: Callable[[torch.optim.Optimizer], LRScheduler], at: list[int]) -> Make:
    return lambda optimizer: schedulers.SequentialLR(optimizer, [part(optimizer) for part in parts], at)


def still(part: float) -> Make:
    return lambda optimizer: schedulers.ConstantLR(optimizer, part, total_iters=1000)


def line(begin: float, end: float, steps: int) -> Make:
    return lambda optimizer: schedulers.LinearLR(optimizer, begin, end, steps)


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": ({} if kind == "WarmupCosineLR" else {"warmup_max_lr": LR}) | params}


CASES: dict[str, tuple[dict[str, Any] | None, Make]] = {
    "constant": (None, still(1.0)),
    "warmup along a line": (
        scheduler("WarmupLR", warmup_num_steps=5, warmup_type="linear", warmup_min_lr=LR / 4),
        one_after_another(still(0.25), line(0.25, 1.0, 5), at=[1]),
    ),
    "warmup along a logarithm": (scheduler("WarmupLR", warmup_num_steps=5), by_formula("WarmupLR", 5)),
    "a warmup of one step counts as two": (
        scheduler("WarmupLR", warmup_num_steps=1, warmup_min_lr=LR / 2),
        by_formula("WarmupLR", 2, start=0.5),
    ),
    "no warmup": (scheduler("WarmupLR", warmup_num_steps=0), still(1.0)),
    "decay after a line": (
        scheduler("WarmupDecayLR", warmup_num_steps=3, total_num_steps=9, warmup_type="linear", warmup_min_lr=LR / 8),
        one_after_another(still(0.125), line(0.125, 1.0, 3), line(1.0, 0.0, 6), at=[1, 4]),
    ),
    "decay after a logarithm": (
        scheduler("WarmupDecayLR", warmup_num_steps=4, total_num_steps=20),
        by_formula("WarmupDecayLR", 4, total=20),
    ),
    "decay without warmup": (
        scheduler("WarmupDecayLR", warmup_num_steps=0, total_num_steps=10),
        one_after_another(still(1.0), line(1.0, 0.0, 10), at=[1]),
    ),
    "cosine": (
        scheduler("WarmupCosineLR", warmup_num_steps=0, total_num_steps=STEPS, cos_min_ratio=0.0),
        lambda optimizer: schedulers.CosineAnnealingLR(optimizer, STEPS),
    ),
    "cosine after a line, down to a floor": (
        scheduler(
            "WarmupCosineLR",
            warmup_num_steps=3,
            total_num_steps=10,
            warmup_type="linear",
            warmup_min_ratio=0.2,
            cos_min_ratio=0.1,
        ),
        by_formula("WarmupCosineLR", 3, start=0.2, log=False, total=10, floor=0.1),
    ),
    "cosine after a logarithm": (
        scheduler("WarmupCosineLR", warmup_num_steps=4, total_num_steps=9),
        by_formula("WarmupCosineLR", 4, total=9, floor=1e-4),
    ),
}


def make(
    schedule: dict[str, Any] | None, stage: int, groups: bool = False, micro_steps: int = 1
) -> tuple[nn.Module, zeroth.Engine]:
    model = zoo.make("plain")
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        **({"scheduler": schedule} if schedule else {}),
    }
    return model, zeroth.Engine(model, config, params=groups_of(model) if groups else None, log_level="off")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Biases with a rate of their own; matrices with that of the configuration."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 5 * LR},
    ]


class Schedules(unittest.TestCase):
    def check(self, schedule: dict[str, Any] | None, torchs: Make, stage: int, groups: bool) -> None:
        model, engine = make(schedule, stage, groups)
        reference = zoo.make("plain")
        optimizer = torch.optim.AdamW(
            groups_of(reference) if groups else reference.parameters(), lr=LR, weight_decay=0.01
        )
        theirs = torchs(optimizer)
        for step in range(STEPS):
            engine.backward(engine(*BATCH))
            result = engine.step()
            optimizer.zero_grad()
            reference(*BATCH).backward()
            self.assertAlmostEqual(result.lr, optimizer.param_groups[0]["lr"], delta=TOLERANCE, msg=f"step {step}")
            optimizer.step()
            theirs.step()
        engine.close()
        for name, expected in reference.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), expected, rtol=TOLERANCE, atol=TOLERANCE)

    @tier.both
    def test_rates_and_weights_are_those_of_torch(self) -> None:
        every = list(itertools.product(CASES, (0, 3)))
        few = [(name, (0, 3)[number % 2]) for number, name in enumerate(CASES)]
        for name, stage in tier.rows(every, few):
            with self.subTest(name, stage=stage):
                self.check(*CASES[name], stage, groups=False)

    @tier.both
    def test_every_group_follows_the_schedule_at_its_own_height(self) -> None:
        few = ["constant", "decay after a logarithm", "cosine after a line, down to a floor"]
        for name in tier.rows(list(CASES), few):
            with self.subTest(name):
                self.check(*CASES[name], stage=3, groups=True)

    def test_only_committed_updates_count(self) -> None:
        schedule, _ = CASES["cosine after a line, down to a floor"]
        model, engine = make(schedule, stage=3, micro_steps=2)
        weight: Any = model.get_parameter("head.weight")
        rates = []
        for micro_step in range(16):
            spoilt = weight.register_hook(lambda grad: grad * float("nan")) if micro_step in (4, 7) else None
            engine.backward(engine(*BATCH))
            result = engine.step()
            self.assertEqual(result.boundary, micro_step % 2 == 1)
            if spoilt:
                spoilt.remove()
            if result.boundary:
                self.assertEqual(result.committed, micro_step not in (5, 7))
                rates.append(result.lr)
        expected = [
            LR * factor(t, "WarmupCosineLR", 3, start=0.2, log=False, total=10, floor=0.1)
            for t in (0, 1, 2, 2, 2, 3, 4, 5)
        ]
        for mine, wanted in zip(rates, expected, strict=True):
            self.assertAlmostEqual(mine, wanted, delta=TOLERANCE)


if __name__ == "__main__":
    tier.main()
