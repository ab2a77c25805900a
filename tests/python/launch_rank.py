"""One rank that any launcher may start: trains, and says in which world and with which losses; see launch_test.py. With
"group" it does so again over torch's gloo group; with "plain" it is plain torch for two ranks."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import zoo

import zeroth

STEPS = 8
CONFIG = {
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zeroth": {"timeout_ms": 20_000},
}


def trained(world: zeroth.World, log_level: str = "info", json_log: str = "") -> list[str]:
    """Mean losses in hexadecimal, of the same batch in each step."""
    of_ranks = next(zoo.batches(world.size, 1, 1))[0]
    engine = zeroth.Engine(
        zoo.make("plain"), CONFIG, world=world, log_level=log_level, progress_every_s=0, json_log=json_log
    )
    losses = []
    for _ in range(STEPS):
        loss = engine(*of_ranks[world.rank])
        engine.backward(loss)
        assert engine.step().committed
        losses.append(engine.average(loss.item()).hex())
    engine.close()
    return losses


def tell(world: zeroth.World, losses: list[str]) -> None:
    """In one write: some launchers pass on what ranks write without looking for lines."""
    os.write(1, f"{world.rank} of {world.size} over {world.backend}: {' '.join(losses)}\n".encode())


def by_plain_torch() -> list[str]:
    """Losses that two ranks have."""
    model = zoo.make("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    of_ranks = next(zoo.batches(2, 1, 1))[0]
    losses = []
    for _ in range(STEPS):
        loss = torch.stack([model(*batch) for batch in of_ranks]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["plain"]:
        print(*by_plain_torch())
        return
    world = zeroth.World.from_environment()
    tell(world, trained(world))
    if sys.argv[1:] == ["group"]:
        dist.init_process_group("gloo")
        group = zeroth.World.from_group()
        tell(group, trained(group))
        dist.destroy_process_group()
    elif sys.argv[1:]:
        trained(world, "off", json_log=sys.argv[1])


if __name__ == "__main__":
    main()
