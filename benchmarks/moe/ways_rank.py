"""A rank of ways.py."""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import torch
from torch import nn

import zeroth
import zeroth.nn

WAYS: dict[str, dict[str, Any]] = {
    "experts": {"meet": "experts", "pieces": 1},
    "experts, 2 pieces": {"meet": "experts", "pieces": 2},
    "balance, 1 copy": {"meet": "balance", "copies": 1},
    "balance, 4 copies": {"meet": "balance", "copies": 4},
    "tokens, 4 copies": {"meet": "tokens", "copies": 4},
    "tokens, all": {"meet": "tokens", "copies": 1 << 20},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for key in ("cycles", "tokens", "width", "experts"):
        parser.add_argument(f"--{key}", type=int, required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    mesh = world.mesh({"dp": 1, "ep": world.size})
    ep = mesh.axis("ep")
    torch.manual_seed(0)
    width = given.width
    expert = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    block = nn.ModuleDict({"experts": zeroth.nn.Experts(expert, given.experts)})
    found = zeroth.experts(block, mesh)
    exchange = found.exchanges[0]
    generator = torch.Generator().manual_seed(1 + ep.rank)
    x = torch.randn(given.tokens, width, generator=generator, requires_grad=True)
    odds = 1 / torch.arange(1, given.experts + 1)
    chosen = torch.multinomial(odds.expand(given.tokens, -1), 2, generator=generator)
    weights = torch.rand(given.tokens, 2, generator=generator)

    def step() -> None:
        out = block["experts"](x, chosen, weights)  # type: ignore[operator]
        out.sum().backward()
        block.zero_grad()
        x.grad = None

    defaults = {"copies": 1, "pieces": 1, "two_hops": False}
    walls: dict[str, list[float]] = {name: [] for name in WAYS}
    facts: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        zeroth.parallel.set_expert_options(block, **defaults | way)
        step()
        before = ep.received_bytes
        step()
        received = ep.received_bytes - before
        plan = zeroth.nn.TokenExchange(chosen, given.experts, exchange)
        own = torch.tensor([sum(plan.rows), received, len(plan.experts_here) - given.experts // ep.size])
        all_ranks = ep.all_gather(own.double()).view(-1, 3)
        facts[name] = {
            "rows": (all_ranks[:, 0].max() / all_ranks[:, 0].mean()).item(),
            "received": all_ranks[:, 1].max().item(),
            "copies": all_ranks[:, 2].max().item(),
        }
    for cycle in range(given.cycles):
        names = list(WAYS) if cycle % 2 == 0 else list(reversed(WAYS))
        for name in names:
            zeroth.parallel.set_expert_options(block, **defaults | WAYS[name])
            step()
            ep.barrier()
            began = time.perf_counter()
            step()
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            walls[name].append(ep.all_reduce(took, "max").item())
    if ep.rank == 0:
        given.result.write_text(json.dumps({"walls": walls, "facts": facts}), encoding="utf-8")


if __name__ == "__main__":
    main()
