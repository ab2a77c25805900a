"""One rank of four: states, checkpoints and exports of a model that is split over tp and sp; see tensor_test.py.

tensor_state_rank.py save FOLDER MODEL...    trains on dp=2 x tp=2, saves, exports, and goes on
tensor_state_rank.py load FOLDER tp=N sp=N stage=N model=NAME    goes on from there on another mesh
"""

from __future__ import annotations

import pathlib
import sys

import safetensors.torch
import tensor_rank
import torch

import zeroth

STEPS = 2


def engine_of(name: str, world: zeroth.World, stage: int, tp: int, sp: int) -> tuple[zeroth.Engine, int, int]:
    """With its rank along dp, and how many there are."""
    model = tensor_rank.made(name)
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zeroth": {"mesh": {"tp": tp, "sp": sp}},
    }
    own, ranks = world.rank // (tp * sp), world.size // (tp * sp)
    return zeroth.Engine(model, config, world=world, log_level="warning"), own, ranks


def steps(engine: zeroth.Engine, first: int, own: int, ranks: int) -> list[float]:
    """Losses of steps with two batches, whatever the mesh: fewer ranks along dp take several."""
    losses = []
    for step in range(first, first + STEPS):
        total = 0.0
        for number in range(own, 2, ranks):
            loss = engine(**tensor_rank.batch(step, number)).loss
            engine.backward(loss)
            total += loss.item() / 2
            engine.step()
        losses.append(engine.average(total) * ranks)
    return losses


def save(folder: pathlib.Path, world: zeroth.World, names: list[str]) -> None:
    for name in names:
        engine, own, ranks = engine_of(name, world, 3, 2, 1)
        steps(engine, 0, own, ranks)
        engine.save(folder / name)
        engine.export_safetensors(str(folder / f"{name}.safetensors"))
        state = engine.state_dict(ranks=None)
        moments = {key: engine.full(key, "exp_avg") for key in list(state)[:3]}
        written = safetensors.torch.load_file(folder / f"{name}.safetensors")
        for key, value in written.items():
            assert torch.equal(state[key], value), (name, key)
        parts = engine.local("exp_avg_sq")
        assert sum(one.tensor.numel() for one in parts.values()) < sum(one.numel() for one in state.values())
        losses = steps(engine, STEPS, own, ranks)
        if world.rank == 0:
            torch.save((state, moments, losses), folder / f"{name}.pt")
        engine.close(keep_parameters=False)
    print("saved: ok")


def load(folder: pathlib.Path, world: zeroth.World, name: str, tp: int, sp: int, stage: int) -> None:
    engine, own, ranks = engine_of(name, world, stage, tp, sp)
    engine.load(folder / name)
    state, moments, losses = torch.load(folder / f"{name}.pt", weights_only=True)
    mine = engine.state_dict(ranks=None)
    assert mine.keys() == state.keys()
    assert all(torch.equal(mine[key], value) for key, value in state.items()), name
    for key, value in moments.items():
        assert torch.equal(engine.full(key, "exp_avg"), value), (name, key)
    if ranks == 2:
        got = steps(engine, STEPS, own, ranks)
        assert all(tensor_rank.close(one, other) for one, other in zip(got, losses, strict=True)), (got, losses)
    # Weights of the whole model go into any mesh.
    engine.load_state_dict({key: value * 2 for key, value in state.items()})
    doubled = engine.state_dict(ranks=None)
    assert all(torch.equal(doubled[key], 2 * value) for key, value in state.items() if "position" not in key), name
    engine.close(keep_parameters=False)
    print("loaded: ok")


def main() -> None:
    world = zeroth.World.from_environment()
    folder = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "save":
        return save(folder, world, sys.argv[3:])
    options = dict(argument.split("=") for argument in sys.argv[3:])
    return load(folder, world, options["model"], int(options["tp"]), int(options["sp"]), int(options["stage"]))


if __name__ == "__main__":
    main()
