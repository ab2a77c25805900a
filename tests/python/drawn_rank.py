"""One rank of several that run trainings drawn from seeds; see drawn_test.py.

drawn_rank.py BEGIN END

Each training runs in two ways with the same bits, the other one whole, or from a checkpoint that the first one saved
half-way; in float64 its numbers are those of one process. Planned memory is measured, and planned bytes are on the
wire."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from typing import Any

import torch
from drawn import TILE_BYTES, Training, draw_config, draw_training
from pipe_rank import STEPS, Trained, batch, compare, loss_fn, made, plain

import zeroth

HALF = STEPS // 2


def run(
    training: Training,
    config: dict[str, Any],
    world: zeroth.World,
    *,
    save_to: str | None = None,
    load_from: str | None = None,
) -> Trained:
    """`save_to`: a folder, after half of the steps, which ends it; `load_from`: goes on from there."""
    dtype = torch.float64 if training.dtype == "float64" else torch.float32
    model = made(training.model, dtype, training.layers)
    if training.tiled:
        zeroth.tile(model, larger_than=TILE_BYTES)
    if training.pp > 1:
        zeroth.pipeline(model, config, world=world, loss_fn=None if training.is_shared else loss_fn)
    elif training.is_shared:
        zeroth.parallelize(model, config, world=world)
    engine = zeroth.Engine(model, config, world=world, log_level="error")
    inner = training.tp * training.sp
    dp = world.size // training.pp // inner
    own = world.rank // inner % dp
    losses, norms = [], []
    if load_from is not None:
        engine.load(load_from)
    engine.reset_counters()
    steps = range(0 if load_from is None else HALF, STEPS if save_to is None else HALF)
    for step in steps:
        batches: list[Any] = [batch(step, dp * number + own) for number in range(training.micro)]
        if training.is_shared:
            batches = [{"input_ids": tokens, "labels": tokens} for _, tokens in batches]
        result, loss = engine.train_batch(batches) if training.pp > 1 else step_of(engine, batches)
        assert result.committed or training.steps_may_be_skipped, result
        losses.append(loss)
        norms.append(result.grad_norm)
    if training.dtype == "float64":  # a sum of gradients is float32, beyond a plan of 16 bits
        report, wire = engine.memory_report(), engine.wire_report()
        assert wire["all_gather"] == len(steps) * wire["planned_all_gather"], wire
        # A rank that gets no core for long may make others copy a bucket in vain (docs/decisions/0032).
        if engine.average(float(report.spills)) == 0:
            assert report.planned == report.measured_peak, str(report)
            assert wire["reduce_scatter"] == len(steps) * wire["planned_reduce_scatter"], wire
    if save_to is not None:
        engine.save(save_to)
    weights = engine.state_dict(ranks=None)
    if training.tiled:
        weights = zeroth.untiled_state_dict(model, weights)
    engine.close(keep_parameters=False)
    return losses, norms, weights


def step_of(engine: zeroth.Engine, batches: list[Any]) -> tuple[zeroth.StepResult, float]:
    total = 0.0
    for one in batches:
        loss = engine(**one).loss if isinstance(one, dict) else loss_fn(engine(**one[0]), one[1])
        engine.backward(loss)
        total += loss.item()
        result = engine.step()
    return result, engine.average(total / len(batches))


def same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def check(seed: int, world: zeroth.World) -> None:
    draw = random.Random(seed)
    training = draw_training(draw, world.size)
    configs = [draw_config(draw, training, world.size) for _ in range(2)]
    first = run(training, configs[0], world)
    if draw.random() < 0.5:
        second = run(training, configs[1], world)
    else:  # half of it in one way, the rest in the other
        folder = os.path.join(tempfile.gettempdir(), f"zeroth-drawn-{os.getppid()}-{seed}")
        losses, norms, _ = run(training, configs[0], world, save_to=folder)
        rest = run(training, configs[1], world, load_from=folder)
        second = (losses + rest[0], norms + rest[1], rest[2])
        if world.rank == 0:  # after steps of all ranks
            shutil.rmtree(folder)
    for got, other in zip(first[:2], second[:2], strict=True):
        assert len(got) == len(other) and all(map(same, got, other)), (got, other)
    for name, value in first[2].items():
        assert torch.equal(value, second[2][name]), name
    if training.dtype == "float64":
        dp = world.size // (training.pp * training.tp * training.sp)
        sgd = not training.adamw
        expected = plain(training.model, dp * training.micro, training.clip, training.layers, sgd)
        compare(training, first, expected, sgd=sgd)


def main() -> None:
    world = zeroth.World.from_environment()
    begin, end = map(int, sys.argv[1:])
    for seed in range(begin, end):
        try:
            check(seed, world)
        except BaseException as error:
            draw = random.Random(seed)
            training = draw_training(draw, world.size)
            texts = [json.dumps(draw_config(draw, training, world.size)) for _ in range(2)]
            error.add_note(f"seed {seed} of {world.size} ranks: {training}\n" + "\n".join(texts))
            raise
    print(f"{end - begin} trainings: ok")


if __name__ == "__main__":
    main()
