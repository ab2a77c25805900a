"""One rank of save_bench.py: writes seconds of every sample as JSON.

save_rank.py --layers N --width N --rounds N --folder FOLDER --out FILE-%d.json [--steps N --batch N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zeroth

BLOCK = 8 << 20


def make_model(arguments: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(arguments.width, arguments.width) for _ in range(arguments.layers)))


class Rank:
    """Takes the time of what all ranks do together, each from a barrier on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = pathlib.Path(arguments.folder)
        self.seconds: dict[str, list[float]] = {}
        self.arguments = arguments
        model = make_model(arguments)
        self.engine = zeroth.Engine(
            model,
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
            units=list(model),
            log_level="warning",
        )
        self.rank, self.world = self.engine.rank, self.engine.world_size
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/meeting", rank=self.rank, world_size=self.world
        )
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.batch = torch.randn(arguments.batch, arguments.width)
        self.shard = 12 * self.numel // self.world // BLOCK * BLOCK
        self.source = torch.randint(0, 255, (self.shard,), dtype=torch.uint8)
        self.copy = torch.zeros_like(self.source)
        self.aligned = mmap.mmap(-1, BLOCK)
        self.aligned.write(os.urandom(BLOCK))

    @contextlib.contextmanager
    def sample(self, name: str) -> Iterator[None]:
        dist.barrier()
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def step(self) -> None:
        self.engine.backward(self.engine(self.batch).square().mean())
        self.engine.step()

    def fresh(self, name: str) -> pathlib.Path:
        """A folder that is not there."""
        path = self.folder / name
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def forget(self, path: pathlib.Path) -> None:
        """Takes the files out of the page cache."""
        for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    # --- what the machine can -----------------------------------------------------------------------------------------

    def limits(self) -> None:
        path = self.folder / f"limit-{self.rank}"
        path.unlink(missing_ok=True)
        with self.sample("limit: write"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(descriptor, 0, self.shard)
            for offset in range(0, self.shard, BLOCK):
                os.pwrite(descriptor, self.aligned, offset)
            os.fsync(descriptor)
            os.close(descriptor)
        with self.sample("limit: read, disk"):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            for offset in range(0, self.shard, BLOCK):
                os.preadv(descriptor, [self.aligned], offset)
            os.close(descriptor)
        view = memoryview(self.copy.numpy())
        for name in ("", "limit: read, cache"):
            with self.sample(name) if name else contextlib.nullcontext():
                descriptor = os.open(path, os.O_RDONLY)
                for offset in range(0, self.shard, 1 << 20):
                    os.preadv(descriptor, [view[offset : offset + (1 << 20)]], offset)
                os.close(descriptor)
        path.unlink()
        with self.sample("limit: memory copy"):
            self.copy.copy_(self.source)

    # --- Zeroth -------------------------------------------------------------------------------------------------------

    def zeroth(self, first: bool) -> None:
        path = self.fresh("zeroth")
        with self.sample("zeroth: save"):
            self.engine.save(path)
        for where in ("disk", "cache"):
            if where == "disk":
                self.forget(path)
            with self.sample(f"zeroth: load, {where}"):
                self.engine.load(path)
        path = self.fresh("zeroth")
        with self.sample("zeroth: save behind, all of it"):
            # The first has to make its copy's memory; it has a row of its own.
            with self.sample("zeroth: save behind, first stall" if first else "zeroth: save behind, stall"):
                handle = self.engine.save(path, async_=True)
            handle.wait()
        self.fresh("zeroth")

    # --- torch --------------------------------------------------------------------------------------------------------

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}

    def torch(self, states: dict[str, Any]) -> None:
        path = self.fresh("torch")
        with self.sample("torch.save and fsync, rank 0"):
            if self.rank == 0:
                with path.open("wb") as file:
                    torch.save(states, file)
                    file.flush()
                    os.fsync(file.fileno())
            dist.barrier()
        self.forget(path)
        with self.sample("torch.load, disk, every rank"):
            torch.load(path, weights_only=True)
        dist.barrier()
        if self.rank == 0:
            path.unlink()

        path = self.fresh("dcp")
        named = {"model": states["model"], "optimizer": {str(key): value for key, value in states["optimizer"].items()}}
        with self.sample("DCP: save"):
            dcp.save(named, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        self.forget(path)
        with self.sample("DCP: load, disk"):
            dcp.load(named, storage_reader=dcp.FileSystemReader(path))
        path = self.fresh("dcp")
        with self.sample("DCP async: all of it"):
            with self.sample("DCP async: stall"):
                future = dcp.async_save(named, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
            future.result()
            dist.barrier()
        self.fresh("dcp")

    # --- a checkpoint in every iteration ------------------------------------------------------------------------------

    def every_step(self) -> None:
        """Blocks of steps, with and without a save behind each; ABBA."""
        folder = self.fresh("every")
        for saves in (False, True, True, False):
            name = "steps with a save behind each" if saves else "steps"
            with self.sample(name):
                for _ in range(self.arguments.steps):
                    self.step()
                    if saves:
                        self.engine.save(folder, keep_last=1, async_=True)
            if saves:  # the last one's writing, which the next step would have hidden
                with self.sample("the last save's rest"):
                    self.engine.barrier()
                self.step()
                self.engine.save(folder, keep_last=1, async_=True).wait()
        self.fresh("every")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--layers", "--width", "--rounds", "--steps", "--batch"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = Rank(arguments)
    model = make_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters())
    model(rank.batch[:1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rank.step()
    parts: list[Callable[[], None]] = [
        rank.limits,
        lambda: rank.torch(rank.states(model, optimizer)),
        lambda: rank.zeroth(first=False),
    ]
    rank.zeroth(first=True)
    for name in list(rank.seconds):  # the first time of everything else is none of the samples
        if name != "zeroth: save behind, first stall":
            del rank.seconds[name]
    for number in range(arguments.rounds):
        for part in parts if number % 2 == 0 else reversed(parts):
            part()
    if arguments.steps:
        for _ in range(max(1, arguments.rounds // 2)):
            rank.every_step()
    pathlib.Path(arguments.out % rank.rank).write_text(
        json.dumps({"seconds": rank.seconds, "bytes": 12 * rank.numel, "shard": rank.shard})
    )
    dist.barrier()
    dist.destroy_process_group()
    rank.engine.close(keep_parameters=False)


if __name__ == "__main__":
    main()
