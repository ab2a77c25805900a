"""One of four ranks with layers of zeroth.nn.MoE on ep=2 x dp=2, beside a plain loop of torch over all batches; see
moe_test.py. Prints a line when all held."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
from torch import nn

import zeroth
import zeroth.nn

MESH = {"ep": 2, "dp": 2}
BATCH = 12
STEPS = 4
LR = 1e-2


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, balance: float = 0.0, **arguments: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 12)
        self.moe = zeroth.nn.MoE(12, Mlp(12), num_experts=5, **arguments)
        self.out = nn.Linear(12, 1)
        self.balance = balance

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        mixed, balance, counts = self.moe(h)
        assert counts.sum() == x.shape[0] * self.moe.k
        loss: torch.Tensor = ((self.out(h + mixed) - y) ** 2).mean() + self.balance * balance
        return loss


CASES: dict[str, dict[str, Any]] = {
    "balance": {"balance": 0.3, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False},
    "drops by position": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1, "use_rts": False},
    "drops by draw": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1},
    "second drawn": {"k": 2, "capacity_factor": 0.8, "min_capacity": 1, "use_residual": True},
    "jitter": {"k": 3, "drop_tokens": False, "noisy_gate_policy": "Jitter"},
    "noise": {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 2},
}


def made(case: dict[str, Any]) -> Net:
    torch.manual_seed(5)
    return Net(**case).double()


def batches() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each step and rank."""
    generator = torch.Generator().manual_seed(7)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [[(one(BATCH, 8), one(BATCH, 1)) for _ in range(4)] for _ in range(STEPS)]


def by_hand(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What plain torch makes of it: with a balance loss all ranks' tokens are one batch; otherwise each rank's tokens
    are dropped alone."""
    model = made(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    for step, of_ranks in enumerate(batches()):
        optimizer.zero_grad()
        if model.balance > 0:
            model(torch.cat([x for x, _ in of_ranks]), torch.cat([y for _, y in of_ranks])).backward()
            model.moe.begin_step()
        else:
            for x, y in of_ranks:
                model.moe.forwards.fill_(step)  # each rank's first forward of the step
                (model(x, y) / 4).backward()
        optimizer.step()
    return model.state_dict()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"mesh": MESH},
    }


def train(engine: zeroth.Engine, rank: int, begin: int, end: int) -> None:
    for of_ranks in batches()[begin:end]:
        engine.backward(engine(*of_ranks[rank]))
        engine.step()


def check_case(name: str, world: zeroth.World, stage: int) -> None:
    expected = by_hand(CASES[name])
    engine = zeroth.Engine(made(CASES[name]), config(stage), world=world, log_level="error")
    train(engine, world.rank, 0, STEPS)
    got = engine.state_dict()  # whole on rank 0
    assert world.rank > 0 or got.keys() == expected.keys(), (name, got.keys() ^ expected.keys())
    for key, value in expected.items() if world.rank == 0 else ():
        if key == "moe.forwards":
            continue  # by hand a step has four
        apart = float((got[key].double() - value.double()).abs().max())
        assert apart <= 1e-12, f"{name}: {key} is off by {apart}"
    (use,) = engine.moe_report()
    assert use.name == "moe" and len(use.chosen) == 5 and len(use.rows) == (3 if world.rank % 2 == 0 else 2), use
    assert 0 < use.entropy <= 1, use
    choices = BATCH * CASES[name]["k"]
    assert sum(use.chosen) + use.dropped == choices, use
    drops = {"balance": False, "jitter": False, "drops by position": True, "drops by draw": True}
    assert drops.get(name, use.dropped > 0) == (use.dropped > 0), use
    engine.close(keep_parameters=False)


def check_resume(world: zeroth.World, folder: pathlib.Path) -> None:
    """Which tokens are drawn goes on where it was."""
    states = []
    for resumed in (False, True):
        engine = zeroth.Engine(made(CASES["drops by draw"]), config(2), world=world, log_level="error")
        train(engine, world.rank, 0, 2)
        if resumed:
            engine.save(folder)
            engine.close(keep_parameters=False)
            engine = zeroth.Engine(made(CASES["drops by draw"]), config(3), world=world, log_level="error")
            engine.load(folder)
        train(engine, world.rank, 2, STEPS)
        states.append(engine.state_dict())
        engine.close(keep_parameters=False)
    for key, value in states[0].items():  # whole on rank 0
        assert torch.equal(states[1][key], value), key


def main() -> None:
    world = zeroth.World.from_environment()
    torch.set_num_threads(1)
    for index, name in enumerate(CASES):
        check_case(name, world, (0, 3, 2, 1)[index % 4])
    check_resume(world, pathlib.Path(sys.argv[1]))
    print(f"rank {world.rank}: all cases held", flush=True)


main()
