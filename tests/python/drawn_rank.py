"""One rank of several that run trainings drawn from seeds; see drawn_test.py.

drawn_rank.py BEGIN END

Each training runs in two ways with the same bits, the other one whole, or from a checkpoint that the first one saved
half-way; in float64 its numbers are those of one process. Planned memory is measured, and planned bytes are on the
wire."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import random
import shutil
import sys
import tempfile
from typing import Any

import torch
from drawn import TILE_BYTES, Training, draw_config, draw_training
from pipe_rank import batch, close, loss_fn, made
from torch import nn

import zeroth

STEPS = 2


@dataclasses.dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


@functools.cache
def plain(model_name: str, layers: int, count: int, clip: float, adamw: bool) -> Trained:
    """One process."""
    model = made(model_name, layers=layers)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if not adamw:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    done = Trained([], [], {})
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(count):
            inputs, tokens = batch(step, number)
            loss = loss_fn(model(**inputs), tokens) / count
            loss.backward()
            total += loss.item()
        done.norms.append(nn.utils.clip_grad_norm_(parameters, clip or float("inf")).item())
        optimizer.step()
        done.losses.append(total)
    done.weights = copy.deepcopy(model.state_dict())
    return done


def run(
    training: Training,
    config: dict[str, Any],
    world: zeroth.World,
    *,
    save_after: tuple[int, str] | None = None,
    load_from: tuple[int, str] | None = None,
) -> Trained:
    """`save_after`: so many steps, to a folder, which ends it; `load_from`: goes on after so many."""
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
    done = Trained([], [], {})
    begin = 0
    if load_from is not None:
        begin, folder = load_from
        engine.load(folder)
    engine.reset_counters()
    for step in range(begin, STEPS):
        batches: list[Any] = [batch(step, dp * number + own) for number in range(training.micro)]
        if training.is_shared:
            batches = [{"input_ids": tokens, "labels": tokens} for _, tokens in batches]
        result, loss = engine.train_batch(batches) if training.pp > 1 else step_of(engine, batches)
        assert result.committed or training.steps_may_be_skipped, result
        done.losses.append(loss)
        done.norms.append(result.grad_norm)
        if save_after is not None and step + 1 == save_after[0]:
            engine.save(save_after[1])
            engine.close(keep_parameters=False)
            return done
    steps = STEPS - begin
    if training.dtype == "float64":  # a sum of gradients is float32, beyond a plan of 16 bits
        report, wire = engine.memory_report(), engine.wire_report()
        assert report.planned == report.measured_peak, str(report)
        # Tiles of a matrix that is embedding and head are gathered for both; a pipeline knows it.
        if training.pp > 1 or not training.tiled or training.model == "llama":
            assert wire["all_gather"] == steps * wire["planned_all_gather"], wire
        assert wire["reduce_scatter"] == steps * wire["planned_reduce_scatter"], wire
    done.weights = engine.state_dict(ranks=None)
    if training.tiled:
        done.weights = zeroth.untiled_state_dict(model, done.weights)
    engine.close(keep_parameters=False)
    return done


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
        second = run(training, configs[0], world, save_after=(1, folder))
        rest = run(training, configs[1], world, load_from=(1, folder))
        second = Trained(second.losses + rest.losses, second.norms + rest.norms, rest.weights)
        if world.rank == 0:  # after steps of all ranks
            shutil.rmtree(folder)
    for got, other in ((first.losses, second.losses), (first.norms, second.norms)):
        assert len(got) == len(other) and all(map(same, got, other)), (got, other)
    for name, value in first.weights.items():
        assert torch.equal(value, second.weights[name]), name
    if training.dtype == "float64":
        dp = world.size // (training.pp * training.tp * training.sp)
        expected = plain(training.model, training.layers, dp * training.micro, training.clip, training.adamw)
        assert all(map(close, first.losses, expected.losses)), (first.losses, expected.losses)
        assert all(close(*pair, 4e-12) for pair in zip(first.norms, expected.norms, strict=True)), (
            first.norms,
            expected.norms,
        )
        for name, value in expected.weights.items():
            # An update of AdamW divides by the root of a sum.
            assert (first.weights[name] - value).abs().max() < (1e-8 if training.adamw else 1e-12), name


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
