"""One rank: trains every model of the zoo at every stage and beside plain torch. Started by zeroth-run; see
parity_test.py.

Fails if stages differ in a single bit, or from plain torch by more than 1e-12 in float64. So too where units compute
with copies of the parameters, as on a GPU; with `--device cuda` as the first arguments on one. Accumulation comes with
what users change between
steps: parameters in groups, frozen ones that begin to train, rates from a scheduler of torch's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import zeroth
import zoo
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

STEPS = 4
LR = 1e-2
DECAY = 0.1
TOLERANCE = 1e-12
WIDE = {"reused", "viewed", "checkpoint_inside_reentrant", "slots"}
"""Models whose blocks' gradients come wide: parameters that are used twice, a part whose graph is made in backward, an
object in itself that keeps the graph of the step before until the garbage collector comes."""


def config(stage: int, micro_steps: int, dtype: torch.dtype, copies: bool) -> dict[str, object]:
    return {
        "bf16": {"enabled": dtype == torch.bfloat16},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": micro_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"threads": 1, "timeout_ms": 60_000, "compute_copies": copies},
    }


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Frozen parameters too, so that they may train later."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 2 * DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 2 * LR},
    ]


def scheduler_of(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Another rate in every step."""
    return StepLR(optimizer, 1, 0.5)


def freeze_and_thaw(model: nn.Module, step: int) -> None:
    """Before `step`. Everything trains from the third step on, but the first parameter not in the last one."""
    if step == 2:
        model.requires_grad_(True)
    if step == STEPS - 1:
        next(model.parameters()).requires_grad_(False)


def trained_by_zeroth(
    name: str,
    stage: int,
    micro_steps: int,
    world: zeroth.World,
    dtype: torch.dtype = torch.float64,
    *,
    copies: bool = False,
    device: str = "cpu",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = zoo.make(name, dtype).to(device)
    changes = micro_steps > 1
    engine = zeroth.Engine(
        model,
        config(stage, micro_steps, dtype, copies),
        params=groups_of(model) if changes else None,
        world=world,
        log_level="off",
    )
    scheduler = scheduler_of(engine.optimizer) if changes else None
    losses = []
    for step, micro_batches in enumerate(zoo.batches(world.size, micro_steps, STEPS, dtype)):
        if changes:
            freeze_and_thaw(model, step)
        for of_ranks in micro_batches:
            x, y = (tensor.to(device) for tensor in of_ranks[world.rank])
            loss = engine(x, y)
            if step % 2 == 0:
                engine.backward(loss)
            else:
                loss.backward()
            losses.append(engine.average(loss.item()))
            result = engine.step()
        assert result.committed, result
        if scheduler is not None:
            scheduler.step()
    if copies or device != "cpu":
        assert engine.memory_report().compute_copies > 0
    if dtype == torch.bfloat16 and name not in WIDE:
        wire = engine.wire_report()  # no more than planned: no gradient of a block came wider than its bucket
        assert wire["reduce_scatter"] <= STEPS * wire["planned_reduce_scatter"], (name, stage, wire)
    engine.close()
    assert {value.device.type for value in model.parameters()} == {torch.device(device).type}
    return losses, {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}


def trained_by_torch(
    name: str, micro_steps: int, rank: int, world_size: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process that goes through the batches of all ranks. The buffers at the end are those of `rank`."""
    model = zoo.make(name)
    changes = micro_steps > 1
    trained = groups_of(model) if changes else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=DECAY)
    scheduler = scheduler_of(optimizer) if changes else None
    losses = []
    for step, micro_batches in enumerate(zoo.batches(world_size, micro_steps, STEPS)):
        if changes:
            freeze_and_thaw(model, step)
        for of_ranks in micro_batches:
            before = buffers_of(model)
            after = []
            mean = 0.0
            for x, y in of_ranks:
                model.load_state_dict(before, strict=False)
                loss = model(x, y)
                (loss / (world_size * micro_steps)).backward()
                mean += loss.item() / world_size
                after.append(buffers_of(model))
            model.load_state_dict(after[0], strict=False)
            losses.append(mean)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    model.load_state_dict(after[rank], strict=False)
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.named_buffers()}


def bits(losses: list[float], weights: dict[str, torch.Tensor]) -> tuple[object, ...]:
    return (
        tuple(loss.hex() for loss in losses),
        tuple((key, value.double().numpy().tobytes()) for key, value in sorted(weights.items())),
    )


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    arguments = sys.argv[1:]
    device = "cpu"
    if arguments[:1] == ["--device"]:
        device, arguments = f"cuda:{world.local_rank % torch.cuda.device_count()}", arguments[2:]
        torch.cuda.set_device(device)
    for name in arguments or zoo.MODELS:
        for micro_steps in (1, 2):
            expected_losses, expected = trained_by_torch(name, micro_steps, world.rank, world.size)
            first = None
            for stage in (0, 1, 2, 3):
                losses, weights = trained_by_zeroth(name, stage, micro_steps, world, device=device)
                what = f"{name}, stage {stage}, {micro_steps} micro-steps"
                for mine, theirs in zip(losses, expected_losses, strict=True):
                    assert abs(mine - theirs) <= TOLERANCE * max(1.0, abs(theirs)), (
                        f"{what}: loss {mine}, torch {theirs}"
                    )
                assert weights.keys() == expected.keys(), what
                for key, value in weights.items():
                    worst = (value - expected[key]).abs().max().item() if value.numel() else 0.0
                    assert worst <= TOLERANCE, f"{what}: {key} differs by {worst}"
                    assert value.stride() == expected[key].stride(), f"{what}: strides of {key}"
                first = first or bits(losses, weights)
                assert bits(losses, weights) == first, f"{what}: other bits than at stage 0"
        if device == "cpu":
            for stage in (0, 3):
                copied = bits(*trained_by_zeroth(name, stage, micro_steps, world, copies=True))
                assert copied == first, f"{name}, stage {stage}: other bits with copies of the parameters"
        narrow = [
            bits(*trained_by_zeroth(name, stage, 2, world, torch.bfloat16, device=device)) for stage in (0, 1, 2, 3)
        ]
        assert all(one == narrow[0] for one in narrow), f"{name}: stages differ in bfloat16"
        if world.rank == 0:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
