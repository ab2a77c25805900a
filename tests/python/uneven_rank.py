"""One rank of four with a number of batches of its own; see uneven_test.py.

uneven_rank.py WHAT[,WHAT] TRANSPORT
"""

from __future__ import annotations

import collections
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zeroth

COUNTS = [[3, 5, 0, 4], [2, 2, 2, 2], [1, 3, 3, 3]]
"""Batches of each rank, one row an epoch"""
LR = 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        x = self.inside(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), y)


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def batch(rank: int, epoch: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * epoch + 10 * number + rank)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def loader(rank: int, epoch: int, counts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch(rank, epoch, number) for number in range(counts[epoch][rank])]


def bits(model: nn.Module) -> str:
    text = hashlib.sha256()
    for parameter in model.parameters():
        text.update(parameter.detach().numpy().tobytes())
    return text.hexdigest()


def reference() -> Net:
    """By hand: the mean over the batches that there are."""
    model = net()
    step = 0
    for epoch, counts in enumerate(COUNTS):
        for number in range(max(counts)):
            ranks = [rank for rank in range(4) if number < counts[rank]]
            for rank in ranks:
                (model(*batch(rank, epoch, number)) / len(ranks)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * 0.5 ** (step // 2) * parameter.grad
                    parameter.grad = None
            step += 1
    return model


def engine(world: zeroth.World, stage: int, uneven: str = "join") -> zeroth.Engine:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"uneven": uneven, "timeout_ms": 30_000},
    }
    return zeroth.Engine(net(), config, world=world, log_level="warning")


def join(world: zeroth.World) -> None:
    """The reference's values, the same bits at every stage, and everything that a loop has around it."""
    expected = reference()
    found = collections.Counter()
    for stage in range(4):
        trained = engine(world, stage)
        scheduler = StepLR(trained.optimizer, 2, 0.5)
        for epoch, counts in enumerate(COUNTS):
            own = 0
            for x, y in trained.batches(loader(world.rank, epoch, COUNTS), on_joined_step=lambda _: scheduler.step()):
                loss = trained(x, y)
                trained.backward(loss)
                result = trained.step()
                scheduler.step()
                active = sum(own < count for count in counts)
                assert result.batches == active, (result.batches, active)
                assert trained.average(1.0) == 1.0
                own += 1
            assert own == counts[world.rank]
            with torch.no_grad():
                trained.eval()
                losses = [float(trained(x, y)) for x, y in trained.batches(loader(world.rank, epoch, COUNTS))]
                trained.train()
            assert len(losses) == counts[world.rank]
        assert trained.steps == sum(max(counts) for counts in COUNTS)
        trained.close()
        for own_parameter, theirs in zip(trained.module.parameters(), expected.parameters()):
            torch.testing.assert_close(own_parameter.data, theirs.data, rtol=1e-12, atol=1e-13)
        found[bits(trained.module)] += 1
    assert len(found) == 1, found
    print(f"{world.rank}: {next(iter(found))}", flush=True)


def drop(world: zeroth.World) -> None:
    trained = engine(world, 3, "drop")
    for epoch in range(len(COUNTS)):
        own = 0
        for x, y in trained.batches(loader(world.rank, epoch, COUNTS)):
            trained.backward(trained(x, y))
            assert trained.step().batches == 4
            own += 1
        assert own == min(COUNTS[epoch]), own
    print(f"{world.rank}: dropped", flush=True)
    trained.close()


def error(world: zeroth.World) -> None:
    trained = engine(world, 3, "error")
    for x, y in trained.batches(loader(world.rank, 2, COUNTS)):
        trained.backward(trained(x, y))
        trained.step()


def leave(world: zeroth.World) -> None:
    """All that have a batch leave the loop while rank 0 waits in it; the next one has all of them."""
    trained = engine(world, 3)
    for own, (x, y) in enumerate(trained.batches(loader(world.rank, 2, COUNTS))):
        trained.backward(trained(x, y))
        trained.step()
        if own == 1:
            break
    for x, y in trained.batches(loader(world.rank, 1, COUNTS)):
        trained.backward(trained(x, y))
        assert trained.step().batches == 4
    assert trained.steps == 4
    print(f"{world.rank}: left", flush=True)
    trained.close()


def nonfinite(world: zeroth.World) -> None:
    """A step that is skipped is skipped on ranks without a batch, too, and what ends it ends all loops with the same
    error."""
    config = {
        "zero_optimization": {"stage": 2},
        "zeroth": {"uneven": "join", "timeout_ms": 30_000, "max_nonfinite_steps": 2},
    }
    trained = zeroth.Engine(net(), config, world=world, log_level="warning")
    for own, (x, y) in enumerate(trained.batches(loader(world.rank, 2, COUNTS))):
        trained.backward(trained(x * (float("nan") if own > 0 else 1.0), y))
        trained.step()


def main() -> None:
    torch.set_num_threads(1)
    what, transport = sys.argv[1:]
    if transport == "gloo":
        dist.init_process_group("gloo")
        world = zeroth.World.from_group()
    else:
        world = zeroth.World.from_environment()
    for each in what.split(","):
        {"join": join, "drop": drop, "error": error, "leave": leave, "nonfinite": nonfinite}[each](world)
    if transport == "gloo":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
