"""One rank of several that save a model trained in a pipeline and load it on other meshes; see pipe_test.py.

pipe_state_rank.py save FOLDER MESH SCHEDULE   trains two steps on a mesh of PP, PPxTP or PPxTPxSP and saves
pipe_state_rank.py load FOLDER MESH SCHEDULE   loads, trains one step, and prints what must be the same everywhere
... HEAD MODEL                                 zeroth.pipeline.vocabulary, with the model of that name
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from pipe_rank import Row, batch, config_of, loss_fn, made

import zeroth


def digest(weights: dict[str, torch.Tensor]) -> str:
    text = hashlib.sha256()
    for name in sorted(weights):
        text.update(name.encode())
        text.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def engine_of(
    world: zeroth.World, mesh: tuple[int, int, int], schedule: str, head: str = "whole", name: str = "qwen2"
) -> zeroth.Engine:
    pp, tp, sp = mesh
    known = schedule not in ("none", "deferred")
    row = Row(name, pp, schedule if known else "1f1b", micro=4, tp=tp, sp=sp, vocabulary=head)
    config = config_of(row, 1 if pp > 1 else 2)
    model = zeroth.deferred(lambda: made(name)) if schedule == "deferred" else made(name)
    if pp > 1:
        zeroth.pipeline(model, config, world=world, loss_fn=loss_fn if tp * sp == 1 else None)
    return zeroth.Engine(model, config, world=world, log_level="warning")


def batches(engine: zeroth.Engine, number: int, count: int) -> list[Any]:
    """With labels where the model computes its loss from what ranks share."""
    micro: list[Any] = [batch(number, index) for index in range(count)]
    shares = engine.pipeline is not None and engine.pipeline.chain.loss_fn is None
    return [{"input_ids": tokens, "labels": tokens} for _, tokens in micro] if shares else micro


def step(engine: zeroth.Engine, number: int) -> float:
    micro = batches(engine, number, 4)
    if engine.pipeline is not None:
        return engine.train_batch(micro)[1]
    total = 0.0
    for inputs, tokens in micro:
        loss = loss_fn(engine(**inputs), tokens)
        engine.backward(loss)
        engine.step()
        total += loss.item() / 4
    return total


def main() -> None:
    what, folder, mesh, schedule = sys.argv[1:5]
    pp, tp, sp = [*map(int, mesh.split("x")), 1, 1][:3]
    world = zeroth.World.from_environment()
    engine = engine_of(world, (pp, tp, sp), schedule, *sys.argv[5:])
    if what == "save":
        for number in range(2):
            step(engine, number)
        engine.save(folder)
    else:
        loaded = engine.load(folder)
        assert loaded is not None and loaded.step == 2, loaded
    weights = engine.state_dict(ranks=None)
    moments = engine.state_dict("exp_avg", ranks=None)
    one = engine.full("model.layers.5.mlp.up_proj.weight")
    assert one is not None and torch.equal(one, weights["model.layers.5.mlp.up_proj.weight"])
    loss = engine.eval_batch(batches(engine, 7, 3), micro_batches=3) if pp > 1 else 0.0
    after = step(engine, 2)
    if world.rank == 0:
        print(f"weights {digest(weights)} moments {digest(moments)}")
        print(f"after {after!r} evaluated {loss!r}")
    engine.close(keep_parameters=False)


if __name__ == "__main__":
    main()
