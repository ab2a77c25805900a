"""One of four ranks: the dynamic loss scale of float16 where ranks share matrices or sequences; see
tensor_mixes_test.py. An overflow on any rank is one on all: nobody steps, and the scale stays the same everywhere."""

from __future__ import annotations

from typing import Any

import tensor_rank
import torch

import zeroth

STEPS = 8
INFINITE_AT, RANK = 5, 1
"""a gradient of one rank is infinite in this step"""


def train(axes: dict[str, int], stage: int, norms: str, world: zeroth.World) -> tuple[list[Any], dict[str, Any]]:
    model: Any = tensor_rank.made("llama", torch.float32)
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 100, "hysteresis": 1},
        "zeroth": {"mesh": axes, "tensor": {"norms": norms}},
    }
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    own = world.rank // 2
    strikes: list[bool] = []

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        strikes.append(True)
        return torch.full_like(gradient, torch.inf)

    outcome = []
    for step in range(STEPS):
        loss = engine(**tensor_rank.batch(step, own)).loss
        handle = model.model.layers[1].mlp.up_proj.weight.register_hook(strike) if step == INFINITE_AT else None
        if handle is not None and world.rank != RANK:
            handle.remove()
        engine.backward(loss)
        result = engine.step()
        if handle is not None:
            handle.remove()
        outcome.append((engine.average(loss.item()), result.committed, result.loss_scale, result.grad_norm))
    assert bool(strikes) == (world.rank == RANK)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return outcome, weights


def check(axes: dict[str, int], norms: str, world: zeroth.World, group: zeroth.Communicator) -> None:
    outcome, weights = train(axes, 3, norms, world)
    committed = [one[1] for one in outcome]
    assert not committed[0] and committed[INFINITE_AT - 1] and not committed[INFINITE_AT] and committed[-1], outcome
    scales = [one[2] for one in outcome]
    assert scales[INFINITE_AT] == scales[-1] or scales[INFINITE_AT] == 2 * scales[-1], outcome
    told = torch.tensor([[float(value) for one in outcome for value in one[:3]]], dtype=torch.float64)
    every = group.all_gather(told)
    assert all(torch.equal(row, every[0]) for row in every), (axes, every)
    other, same = train(axes, 1, norms, world)
    assert [one[:3] for one in outcome] == [one[:3] for one in other], (outcome, other)
    assert all(torch.equal(weights[name], value) for name, value in same.items())
    assert all(value.isfinite().all() for value in weights.values())


def main() -> None:
    world = zeroth.World.from_environment()
    group = world.mesh({"dp": world.size}).axis("dp")
    for axes, norms in (({"tp": 2}, "whole"), ({"tp": 2}, "split"), ({"sp": 2}, "whole")):
        check(axes, norms, world, group)
    print("scales: ok")


if __name__ == "__main__":
    main()
