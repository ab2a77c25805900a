"""One rank that trains from a DataLoader with forked workers beside a live engine; see workers_test.py. Arguments: zero
stages, as 0,3; with "group" the engine's world is torch's gloo group, whose threads a worker does not have."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

import zeroth

SAMPLES = 48
BATCH = 3
EPOCHS = 2

Sample = tuple[torch.Tensor, int, int]


class Samples(Dataset[Sample]):
    """Sample i is a function of i; its last part is the process that made it."""

    def __init__(self, engine: zeroth.Engine, killed: bool = False) -> None:
        self.engine = engine  # so the engine is an object of the worker's, too
        self.killed = killed

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        worker = get_worker_info()
        if self.killed and worker is not None and worker.id == 0:
            time.sleep(0.3)  # until the rank waits for its first batch
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator, dtype=torch.float64)
        return x, int(torch.randint(zoo.CLASSES, (), generator=generator)), os.getpid()


def loader(engine: zeroth.Engine, killed: bool = False, **settings: Any) -> DataLoader[Sample]:
    samples = Samples(engine, killed)
    order: DistributedSampler[Sample] = DistributedSampler(
        samples, engine.world_size, engine.rank, shuffle=True, seed=5
    )
    if settings.get("num_workers"):
        settings["multiprocessing_context"] = "fork"
    return DataLoader(samples, BATCH, sampler=order, **settings)


def require_death(engine: zeroth.Engine) -> None:
    try:
        next(iter(loader(engine, killed=True, num_workers=2)))
    except RuntimeError as error:
        assert re.search(r"DataLoader worker \(pid.*(killed by signal: Killed|exited unexpectedly)", str(error)), error
        print("torch says:", error, flush=True)
    else:
        sys.exit("a worker was killed, and nobody noticed")


def trained(stage: int, world: zeroth.World, death: bool = False, **settings: Any) -> tuple[list[str], set[int]]:
    """Losses and weights in hexadecimal, and the processes that made samples."""
    model = zoo.make("plain")
    config = {"zero_optimization": {"stage": stage}, "zeroth": {"timeout_ms": 20_000}}
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    batches = loader(engine, **settings)
    bits: list[str] = []
    makers: set[int] = set()
    for epoch in range(EPOCHS):
        if death and epoch == 1 and world.rank == 1:  # the other rank waits for this one in its next step
            require_death(engine)
        for x, y, pids in batches:
            loss = engine(x, y)
            engine.backward(loss)
            assert engine.step().committed
            bits.append(loss.item().hex())
            makers.update(pids.tolist())
    assert engine.steps == EPOCHS * SAMPLES // BATCH // world.size
    del batches  # persistent workers end with it
    engine.close()
    bits += [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return bits, makers


def main() -> None:
    world = zeroth.World.from_environment()
    stages = [int(stage) for stage in sys.argv[1].split(",")]
    if sys.argv[2:] == ["group"]:
        dist.init_process_group("gloo")
        world = zeroth.World.from_group()
    everybody = {os.getpid()}
    for stage in stages:
        expected, makers = trained(stage, world, num_workers=0)
        assert makers == {os.getpid()}
        ways: list[dict[str, Any]] = [
            {"num_workers": 2},
            {"num_workers": 2, "persistent_workers": True},
            {"num_workers": 2, "death": True},
        ]
        for settings in ways:
            bits, makers = trained(stage, world, **settings)
            assert bits == expected, f"stage {stage}, {settings}: other bits than without workers"
            assert (
                len(makers) == (2 if "persistent_workers" in settings else 2 * EPOCHS) and os.getpid() not in makers
            ), makers
            assert not multiprocessing.active_children(), f"stage {stage}, {settings}: workers live on"
            everybody |= makers
    print("processes:", *everybody, flush=True)
    print("world:", world.backend, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
