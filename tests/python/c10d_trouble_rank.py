"""One rank over torch's gloo group that gets into trouble, or asks for what there is not. Started by zeroth-run; see
c10d_test.py."""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch import nn

import zeroth

X, Y = next(iter(zoo.batches(1, 1, 1, torch.float64)))[0][0]


def config(stage: int = 3, dtype: torch.dtype = torch.float64, **own: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"threads": 1, "timeout_ms": 60_000} | own,
    }


class Skipping(nn.Module):
    """Four blocks; the one with the number `skipped` is left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.skipped = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = torch.tanh(block(x))
        return x.square().mean()


def train(engine: zeroth.Engine, dtype: torch.dtype = torch.float64) -> None:
    engine.backward(engine(X.to(dtype), Y))
    engine.step()


def skip(world: zeroth.World, stage: str, per_node: str = "0") -> None:
    model = Skipping()
    engine = zeroth.Engine(model, config(int(stage), ranks_per_node=int(per_node)), world=world, log_level="off")
    try:
        for step in range(4):
            if step == 2 and world.rank == 1:
                model.skipped = 2
            engine.backward(engine(torch.ones(3, 8)))
            engine.step()
    except RuntimeError as error:
        print(f"rank {world.rank} is told: {error}", flush=True)
        time.sleep(1.0)  # the launcher ends the others soon after the first: each shall have spoken
        sys.exit(1)


def kill(world: zeroth.World) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off")
    while True:
        train(engine)
        if world.rank == 1 and engine.steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def leave(world: zeroth.World) -> None:
    """An end that the launcher takes for a good one: the other rank has to notice."""
    engine = zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off")
    while True:
        train(engine)
        if world.rank == 1 and engine.steps == 3:
            os._exit(0)


def exception(world: zeroth.World) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off")
    for step in range(100):
        if world.rank == 1 and step == 3:
            raise ValueError("a mistake of the user's")
        train(engine)


def export(world: zeroth.World, folder: str) -> None:
    written = []
    for name, where in (("group", world), ("memory", zeroth.World.from_environment())):
        engine = zeroth.Engine(zoo.make("odd"), config(), world=where, log_level="off")
        train(engine)
        path = pathlib.Path(folder) / f"{name}.safetensors"
        engine.export_safetensors(str(path))
        engine.close()
        written.append(path.read_bytes())
    assert written[0] == written[1], "another file than over shared memory"
    try:
        engine = zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off")
        engine.export_safetensors(folder + "/not/there")
        raise AssertionError("an export to nowhere")
    except zeroth.Error as error:
        assert error.code == "IO", error
    train(engine)


def subgroup(world: zeroth.World) -> None:
    group = dist.new_group([0, 2])
    if world.rank == 1:
        try:
            zeroth.World.from_group(group)
            raise AssertionError("rank 1 is no member")
        except zeroth.Error as error:
            assert error.code == "USAGE", error
    else:
        part = zeroth.World.from_group(group)
        assert (part.rank, part.size) == (world.rank // 2, 2), part
        engine = zeroth.Engine(zoo.make("plain"), config(), world=part, log_level="off")
        train(engine)
        engine.close()
    whole = zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off")
    train(whole)
    whole.close()


def wire(world: zeroth.World) -> None:
    for name, stage, dtype in itertools.product(
        ("plain", "root_mean_square"), (0, 1, 2, 3), (torch.float64, torch.bfloat16)
    ):
        engine = zeroth.Engine(zoo.make(name, dtype), config(stage, dtype), world=world, log_level="off")
        train(engine, dtype)
        engine.reset_counters()
        train(engine, dtype)
        report, memory = engine.wire_report(), engine.memory_report()
        assert report["all_gather"] == report["planned_all_gather"], (stage, report)
        assert report["reduce_scatter"] == report["planned_reduce_scatter"] > 0, (stage, report)
        assert memory.measured_peak == memory.planned, (stage, memory)
        engine.close()


def wide(world: zeroth.World) -> None:
    """Losses that are kept with their graphs: one more use of each parameter, as far as anybody can see."""
    weights = []
    for narrow in (True, False):
        settings = config(2, torch.bfloat16, narrow_buckets=narrow)
        with tempfile.NamedTemporaryFile(mode="r") as log:
            model = zoo.make("plain", torch.bfloat16)
            engine = zeroth.Engine(model, settings, world=world, log_level="off", json_log=log.name)
            losses = []
            for _ in range(3):
                losses.append(engine(X.bfloat16(), Y))
                engine.backward(losses[-1])
                engine.step()
            said = [line for line in log if "came wider than its bucket" in line]
        assert len(said) == int(narrow) and all("blocks." in line and "loss.item()" in line for line in said), said
        memory = engine.memory_report()
        assert ("overflow" in memory.measured_peak) == narrow, memory
        assert (memory.measured_peak == memory.planned) != narrow, memory
        engine.close()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def worlds(world: zeroth.World) -> None:
    """Two worlds over one group of torch: messages of one are under way while ranks exchange in the other."""

    def apart(whole: zeroth.World, **settings: Any) -> zeroth.Engine:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        engine = zeroth.Engine(model, {"zeroth": {"timeout_ms": 20_000}}, world=whole.site(2), log_level="off")
        zeroth.local_updates(engine, 4, outer_lr=0.7, outer_momentum=0.9, **settings)
        return engine

    def steps(engine: zeroth.Engine, count: int) -> None:
        for number in range(count):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + world.rank))
            engine.backward(engine(x).square().mean())
            engine.step()

    def values(engine: zeroth.Engine) -> list[torch.Tensor]:
        weights = [engine.full(f"{layer}.weight") for layer in range(4)]
        engine.close(keep_parameters=False)
        return weights

    found = []
    for together in (True, False):
        first = apart(world, fragments=2, delay=1, keep_local=0.5)
        second = apart(zeroth.World.from_group())
        for engine in [first, second] * 3 if together else [first] * 3 + [second] * 3:
            steps(engine, 5)
        found.append(values(first) + values(second))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def beside(world: zeroth.World) -> None:
    """The group has no backend for CPU tensors, as one of NCCL alone."""
    assert world.backend == "c10d gloo beside blind", world
    train(zeroth.Engine(zoo.make("plain"), config(), world=world, log_level="off"))


def blind_group(_store: object, rank: int, size: int, _timeout: object) -> dist.ProcessGroup:
    from torch._C._distributed_c10d import FakeProcessGroup

    return FakeProcessGroup._create_internal(rank, size)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "beside":
        dist.Backend.register_backend("blind", blind_group, devices=["cuda"])
    dist.init_process_group("blind" if sys.argv[1] == "beside" else "gloo")
    tests = {
        "skip": skip,
        "kill": kill,
        "leave": leave,
        "exception": exception,
        "export": export,
        "subgroup": subgroup,
        "wire": wire,
        "wide": wide,
        "worlds": worlds,
        "beside": beside,
    }
    tests[sys.argv[1]](zeroth.World.from_group(), *sys.argv[2:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
