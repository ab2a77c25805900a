"""A rank of to_loss.py, on a host of its own. Rank 0 writes what was measured as JSON.

to_loss_rank.py --report FILE --train METHOD      losses and bytes of each step, over a cable without a limit
to_loss_rank.py --report FILE --time METHOD...    times of steps after the freeze, in turns over each speed of the link
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import torch
import torch.distributed as dist
from methods import METHODS, Method, Settings
from torch import Tensor
from two_hosts import limit, received_bytes

EARLY = 2
"""steps until 1-bit Adam exchanges signs, where only its later steps are timed"""


class Batches:
    """Of one site: its own texts, the same for every method."""

    def __init__(self, batch: int, length: int) -> None:
        docs = sorted((pathlib.Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))
        data = bytearray(b"".join(path.read_bytes() for path in docs))
        self.text = torch.frombuffer(data, dtype=torch.uint8).unfold(0, length + 1, length).long()
        self.batch = batch
        self.random = torch.Generator().manual_seed(1 + dist.get_rank())

    def next(self) -> tuple[Tensor, Tensor]:
        tokens = self.text[torch.randint(len(self.text), (self.batch,), generator=self.random)]
        return tokens[:, :-1], tokens[:, 1:]


def train(name: str, given: Settings, batches: Batches, steps: int) -> list[dict[str, Any]]:
    """A row a step."""
    method = METHODS[name](given)
    rows = []
    for _ in range(steps):
        before, cpu = received_bytes(), time.process_time()
        loss = method.step(*batches.next())
        counted, planned = method.wire()
        row = {"loss": loss, "received": received_bytes() - before, "counted": counted, "planned": planned}
        rows.append(row | {"cpu": time.process_time() - cpu})
    dist.barrier()
    method.close()
    losses = torch.tensor([row["loss"] for row in rows], dtype=torch.float64)
    dist.all_reduce(losses)
    return [row | {"loss": loss / dist.get_world_size()} for row, loss in zip(rows, losses.tolist(), strict=True)]


def block(method: Method, batches: Batches, steps: int) -> dict[str, Any]:
    """Seconds a step, beside each step's own on this rank and what the library has counted in it."""
    dist.barrier()
    begin, cpu = time.monotonic(), time.process_time()
    each = []
    for _ in range(steps):
        before = time.monotonic()
        method.step(*batches.next())
        each.append((time.monotonic() - before, method.wire()[0]))
    cpu = time.process_time() - cpu
    dist.barrier()
    return {"seconds": (time.monotonic() - begin) / steps, "cpu": cpu / steps, "each": each}


def take_turns(names: list[str], given: Settings, batches: Batches, options: argparse.Namespace) -> dict[str, Any]:
    """A block of each speed and method: {speed: {method: [block]}}, and what gloo moves over each speed."""
    early = dataclasses.replace(given, freeze=EARLY)
    methods = {name: METHODS[name](early) for name in names}
    for name, method in methods.items():
        for _ in range(given.window if name in options.windows else EARLY + 2):
            method.step(*batches.next())  # what later steps have is made, and the phase is the last one
    blocks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    gbits: dict[str, list[float]] = {}
    values = torch.ones(1 << 21)
    for gbit in options.gbit:
        limit(gbit)
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(values)
        dist.barrier()
        gbits[f"{gbit:g}"] = [32e-9 * len(values) / (time.monotonic() - begin)]
        for name, method in methods.items():
            steps = given.window if name in options.windows else options.block
            measured = block(method, batches, steps)
            blocks.setdefault(f"{gbit:g}", {})[name] = [measured]
            if dist.get_rank() == 0:
                print(f"{gbit:g} Gbit/s, {name}: {1e3 * measured['seconds']:.1f} ms a step", flush=True)
    limit(0)
    dist.barrier()
    for method in methods.values():
        method.close()
    return {"blocks": blocks, "gbits": gbits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=pathlib.Path, required=True)
    parser.add_argument("--train")
    parser.add_argument("--time", nargs="+")
    parser.add_argument("--windows", nargs="*", default=[], help="methods whose block is a window")
    parser.add_argument("--gbit", type=float, nargs="+", default=[])
    parser.add_argument("--lr", type=float, required=True)
    names = ("steps", "block", "layers", "width", "batch", "length", "freeze", "warmup", "window")
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = Batches(options.batch, options.length)
    given = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    if options.train:
        found: Any = train(options.train, given, batches, options.steps)
    else:
        found = take_turns(options.time, given, batches, options)
    if dist.get_rank() == 0:
        options.report.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
