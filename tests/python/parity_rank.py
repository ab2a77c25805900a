"""One rank: trains every model of the zoo at every stage and beside plain torch. Started by zeroth-run; see parity_test.py.

Fails if stages differ in a single bit, or from plain torch by more than 1e-12 in float64.
"""

from __future__ import annotations

import sys

import torch
import zoo

import zeroth

STEPS = 4
LR = 1e-2
DECAY = 0.1
TOLERANCE = 1e-12


def config(stage: int, micro_steps: int, dtype: torch.dtype) -> dict[str, object]:
    return {
        "bf16": {"enabled": dtype == torch.bfloat16},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"threads": 1, "timeout_ms": 60_000},
    }


def trained_by_zeroth(
    name: str, stage: int, micro_steps: int, world: zeroth.World, dtype: torch.dtype = torch.float64
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.make(name, dtype)
    engine = zeroth.Engine(model, config(stage, micro_steps, dtype), world=world, log_level="off")
    losses = []
    for step, micro_batches in enumerate(zoo.batches(world.size, micro_steps, STEPS, dtype)):
        for of_ranks in micro_batches:
            x, y = of_ranks[world.rank]
            loss = engine(x, y)
            if step % 2 == 0:
                engine.backward(loss)
            else:
                loss.backward()
            losses.append(engine.average(loss.item()))
            result = engine.step()
        assert result.committed, result
    engine.close()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def trained_by_torch(name: str, micro_steps: int, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.make(name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=DECAY)
    losses = []
    for micro_batches in zoo.batches(world_size, micro_steps, STEPS):
        for of_ranks in micro_batches:
            mean = 0.0
            for x, y in of_ranks:
                loss = model(x, y)
                (loss / (world_size * micro_steps)).backward()
                mean += loss.item() / world_size
            losses.append(mean)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def bits(losses: list[float], weights: dict[str, torch.Tensor]) -> tuple[object, ...]:
    return (tuple(loss.hex() for loss in losses), tuple((key, value.double().numpy().tobytes()) for key, value in sorted(weights.items())))


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    for name in sys.argv[1:] or zoo.MODELS:
        for micro_steps in (1, 2):
            expected_losses, expected = trained_by_torch(name, micro_steps, world.size)
            first = None
            for stage in (0, 1, 2, 3):
                losses, weights = trained_by_zeroth(name, stage, micro_steps, world)
                what = f"{name}, stage {stage}, {micro_steps} micro-steps"
                for mine, theirs in zip(losses, expected_losses, strict=True):
                    assert abs(mine - theirs) <= TOLERANCE * max(1.0, abs(theirs)), f"{what}: loss {mine}, torch {theirs}"
                assert weights.keys() == expected.keys(), what
                for key, value in weights.items():
                    worst = (value - expected[key]).abs().max().item() if value.numel() else 0.0
                    assert worst <= TOLERANCE, f"{what}: {key} differs by {worst}"
                    assert value.stride() == expected[key].stride(), f"{what}: strides of {key}"
                first = first or bits(losses, weights)
                assert bits(losses, weights) == first, f"{what}: other bits than at stage 0"
        narrow = [bits(*trained_by_zeroth(name, stage, 2, world, torch.bfloat16)) for stage in (0, 1, 2, 3)]
        assert all(one == narrow[0] for one in narrow), f"{name}: stages differ in bfloat16"
        if world.rank == 0:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
