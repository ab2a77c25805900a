"""One rank of a pipeline in which stage 1 fails, one way or another; see pipe_faults_test.py.

pipe_faults_rank.py HOW TRANSPORT"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroth

WIDTH, CLASSES, ROWS = 12, 5, 3
MICRO = 4
STEP, MICRO_BATCH = 2, 1
"""of the fault, from 0"""
GUILTY = 1
"""the stage"""


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mistake() -> None:
    raise ValueError("no such token: 50257")


def sleep() -> None:
    time.sleep(600.0)


class Backward(torch.autograd.Function):
    """The identity, with something that happens in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return gradient, None


class Layer(nn.Module):
    """A layer with the fault of this rank, if it has one."""

    act: Callable[[], None] | None = None
    place = "forward"

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide_in, wide_out)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.forwards += 1
        if Layer.act is None or self.forwards != STEP * MICRO + MICRO_BATCH + 1:
            return y
        if Layer.place == "backward":
            done: torch.Tensor = Backward.apply(y, Layer.act)
            return done
        Layer.act()
        return y


def made() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Layer(4, WIDTH), *(Layer(WIDTH, WIDTH) for _ in range(4)), Layer(WIDTH, CLASSES))


def batches(step: int, count: int = MICRO) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(ROWS, 4, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(count)
    ]


def config(world: zeroth.World, *, schedule: str = "1f1b", micro: int = MICRO, timeout_ms: int = 60_000) -> Any:
    return {
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": micro,
        "zeroth": {
            "mesh": {"pp": world.size},
            "pipeline": {"schedule": schedule},
            "timeout_ms": timeout_ms,
            "first_timeout_ms": 60_000,  # of ranks that start, beside other jobs
            "frozen_after_ms": 1_000,
            "threads": 1,
        },
    }


def cut(world: zeroth.World, settings: Any, split: list[str], model: nn.Module | None = None) -> Any:
    return zeroth.pipeline(
        model or made(), settings, world=world, loss_fn=F.cross_entropy, sample=batches(0)[0], split=split
    )


def differ(world: zeroth.World) -> None:
    """Pipelines that are not the same on all ranks; none of them does the next one any harm."""
    guilty = world.rank == GUILTY
    longer = nn.Sequential(*made(), nn.Tanh()) if guilty else None
    for what, attempt in {
        "split": lambda: cut(world, config(world), ["1" if guilty else "2"]),
        "schedule": lambda: cut(world, config(world, schedule="gpipe" if guilty else "1f1b"), ["2"]),
        "steps": lambda: cut(world, config(world, micro=MICRO + guilty), ["2"]),
        "layers": lambda: cut(world, config(world), ["2"], longer),
    }.items():
        told(what, attempt, world)
    model = made()
    settings = config(world)
    done = cut(world, settings, ["2"], model)
    engine = zeroth.Engine(model, settings, world=world, log_level="error")
    other = zeroth._C.make_program("gpipe" if guilty else "1f1b", 2, MICRO)
    again = lambda: zeroth._C.Pipeline(  # noqa: E731
        engine._core, done.mesh.axis("pp"), other, [[0], [0]], lambda *_: ([None], "")
    )
    told("program", again, world)
    engine.train_batch(iter(batches(0)))


def told(what: str, attempt: Callable[[], object], world: zeroth.World) -> None:
    try:
        attempt()
    except zeroth.Error as error:
        say(f"rank {world.rank} is told of {what}: {error}")
        return
    say(f"rank {world.rank} is not told of {what}")


def train(how: str, world: zeroth.World) -> None:
    settings = config(world, timeout_ms=2_000 if how.startswith("sleep") else 60_000)
    model = made()
    cut(world, settings, ["2", "4"][: world.size - 1], model)
    engine = zeroth.Engine(model, settings, world=world, log_level="error")
    odd = world.rank == GUILTY
    for step in range(4):
        begin = time.monotonic()
        try:
            run_step(how if step == STEP else "", engine, batches(step, MICRO + 2), odd=odd)
        except zeroth.Error as error:
            say(f"rank {world.rank} is told after {time.monotonic() - begin:.1f} s: {error}")
            raise


def run_step(how: str, engine: zeroth.Engine, given: list[Any], *, odd: bool) -> None:
    """A step that takes MICRO of the micro-batches, or what takes its place. `odd`: on the rank of the fault."""
    if how == "leave" and odd:
        sys.exit(0)
    if how == "evaluate" and odd:
        engine.eval_batch(iter(given))
    if how == "count":
        engine.eval_batch(iter(given), micro_batches=MICRO + 2 if odd else MICRO)
    if how == "fewer" and odd:
        given = given[: MICRO - 2]
    try:
        engine.train_batch(iter(given))
    except (ValueError, zeroth.Error) as error:
        if not how.startswith("again"):
            raise
        if isinstance(error, zeroth.Error):
            say(f"rank {engine.rank} is told first: {error}")
        engine.train_batch(iter(given))


def main(how: str, transport: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # zeroth-run's, 0.2 s after a death: here a rank may be slower to say
    if transport == "gloo":
        dist.init_process_group("gloo")
    world = zeroth.World.from_group() if transport == "gloo" else zeroth.World.from_environment()
    action, _, Layer.place = how.partition("_")
    acts = {"kill": kill, "stop": stop, "mistake": mistake, "again": mistake, "sleep": sleep}
    if world.rank == GUILTY and Layer.place:
        Layer.act = acts[action]
    differ(world) if how == "differ" else train(how, world)
    say(f"rank {world.rank} has trained")


if __name__ == "__main__":
    main(*sys.argv[1:])
