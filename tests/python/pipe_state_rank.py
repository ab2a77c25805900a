"""One rank of several that save a model trained in a pipeline and load it on other meshes; see pipe_test.py.

pipe_state_rank.py save FOLDER PP SCHEDULE     trains two steps on a mesh of PP stages and saves
pipe_state_rank.py load FOLDER PP SCHEDULE     loads, trains one step, and prints what must be the same everywhere
... HEAD                                       zeroth.pipeline.vocabulary, with a model whose head is not its embedding
"""

from __future__ import annotations

import hashlib
import sys

import torch
from pipe_rank import Row, batch, config_of, loss_fn, made

import zeroth


def digest(weights: dict[str, torch.Tensor]) -> str:
    text = hashlib.sha256()
    for name in sorted(weights):
        text.update(name.encode())
        text.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


def engine_of(world: zeroth.World, pp: int, schedule: str, head: str) -> zeroth.Engine:
    known = schedule not in ("none", "deferred")
    name = "llama" if head else "qwen2"  # whose head is its embedding
    row = Row(name, pp, schedule if known else "1f1b", micro=4, vocabulary=head or "whole")
    config = config_of(row, 1 if pp > 1 else 2)
    model = zeroth.deferred(lambda: made(name)) if schedule == "deferred" else made(name)
    if pp > 1:
        zeroth.pipeline(model, config, world=world, loss_fn=loss_fn)
    return zeroth.Engine(model, config, world=world, log_level="warning")


def step(engine: zeroth.Engine, number: int) -> float:
    micro = [batch(number, index) for index in range(4)]
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
    what, folder, pp, schedule = sys.argv[1:5]
    world = zeroth.World.from_environment()
    engine = engine_of(world, int(pp), schedule, *sys.argv[5:6] or [""])
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
    loss = engine.eval_batch([batch(7, index) for index in range(3)], micro_batches=3) if int(pp) > 1 else 0.0
    after = step(engine, 2)
    if world.rank == 0:
        print(f"weights {digest(weights)} moments {digest(moments)}")
        print(f"after {after!r} evaluated {loss!r}")
    engine.close(keep_parameters=False)


if __name__ == "__main__":
    main()
