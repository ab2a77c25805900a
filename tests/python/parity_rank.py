"""One rank: trains every model of the zoo at every stage and beside plain torch. Started by zeroth-run; see
parity_test.py.

Fails if stages differ in a single bit, or from plain torch by more than 1e-12 in float64. So too where units compute
with copies of the parameters, as on a GPU; with `--device cuda` as the first arguments on one. Accumulation comes with
what users change between steps: parameters in groups, frozen ones that begin to train, rates from a scheduler of
torch's. Models as arguments, or `--short` for the rows of SHORT_LIST with as many ranks as there are.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pairs
import torch
import zoo
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import zeroth

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
    """One process that goes through the batches of all ranks. The buffers at the end are rank 0's, if there are running
    statistics among them, else those of `rank`."""
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
    has_statistics = any(key in model.state_dict() and value.is_floating_point() for key, value in after[0].items())
    model.load_state_dict(after[0 if has_statistics else rank], strict=False)
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.named_buffers()}


def bits(losses: list[float], weights: dict[str, torch.Tensor]) -> tuple[object, ...]:
    return (
        tuple(loss.hex() for loss in losses),
        tuple((key, value.double().numpy().tobytes()) for key, value in sorted(weights.items())),
    )


Row = dict[str, Any]
"""model, micro_steps, stage, kind"""
SHORT_LIST = pairs.pairwise(
    model=tuple(zoo.MODELS),
    world=(1, 2, 3),
    micro_steps=(1, 2),
    stage=(0, 1, 2, 3),
    kind=("beside torch", "copies", "bfloat16"),
)


def grid(names: Sequence[str], device: str) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        for micro_steps, stage in itertools.product((1, 2), (0, 1, 2, 3)):
            rows.append({"model": name, "micro_steps": micro_steps, "stage": stage, "kind": "beside torch"})
        if device == "cpu":
            rows += [{"model": name, "micro_steps": 2, "stage": stage, "kind": "copies"} for stage in (0, 3)]
        rows += [{"model": name, "micro_steps": 2, "stage": stage, "kind": "bfloat16"} for stage in (0, 1, 2, 3)]
    return rows


class Checks:
    """Of rows that need the same trainings."""

    def __init__(self, world: zeroth.World, device: str) -> None:
        self.world, self.device = world, device
        self.by_torch = functools.cache(lambda name, micro: trained_by_torch(name, micro, world.rank, world.size))
        self.at_stage_0 = functools.cache(lambda name, micro, dtype: bits(*self.trained(name, 0, micro, dtype)))

    def trained(
        self, name: str, stage: int, micro_steps: int, dtype: torch.dtype, copies: bool = False
    ) -> tuple[list[float], dict[str, torch.Tensor]]:
        return trained_by_zeroth(name, stage, micro_steps, self.world, dtype, copies=copies, device=self.device)

    def check(self, model: str, micro_steps: int, stage: int, kind: str) -> None:
        what = f"{model}, stage {stage}, {micro_steps} micro-steps, {kind}"
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float64
        losses, weights = self.trained(model, stage, micro_steps, dtype, kind == "copies")
        if kind == "beside torch":
            self.require_close(what, losses, weights, *self.by_torch(model, micro_steps))
        assert bits(losses, weights) == self.at_stage_0(model, micro_steps, dtype), (
            f"{what}: other bits than at stage 0"
        )

    def require_close(
        self,
        what: str,
        losses: list[float],
        weights: dict[str, torch.Tensor],
        expected_losses: list[float],
        expected: dict[str, torch.Tensor],
    ) -> None:
        for mine, theirs in zip(losses, expected_losses, strict=True):
            assert abs(mine - theirs) <= TOLERANCE * max(1.0, abs(theirs)), f"{what}: loss {mine}, torch {theirs}"
        assert weights.keys() == expected.keys(), what
        for key, value in weights.items():
            worst = (value - expected[key]).abs().max().item() if value.numel() else 0.0
            assert worst <= TOLERANCE, f"{what}: {key} differs by {worst}"
            assert value.stride() == expected[key].stride(), f"{what}: strides of {key}"


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    arguments = sys.argv[1:]
    device = "cpu"
    if arguments[:1] == ["--device"]:
        device, arguments = f"cuda:{world.local_rank % torch.cuda.device_count()}", arguments[2:]
        torch.cuda.set_device(device)
    if arguments == ["--short"]:
        rows = [row for row in SHORT_LIST if row["world"] == world.size]
    else:
        rows = grid(arguments or list(zoo.MODELS), device)
    checks = Checks(world, device)
    for row in rows:
        checks.check(**{name: value for name, value in row.items() if name != "world"})
    if world.rank == 0:
        print(f"{len(rows)} trainings: ok", flush=True)


if __name__ == "__main__":
    main()
