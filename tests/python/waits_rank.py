"""One rank of a job in which rank 1 keeps the others waiting, one way or another; see waits_test.py."""

from __future__ import annotations

import ctypes
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
from torch.nn import functional as F

import zeroth

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
FAR = 600.0


def say(text: str) -> None:
    """In one write: mpirun passes on what ranks write without looking for lines."""
    os.write(1, f"{text}\n".encode())


def train(engine: zeroth.Engine) -> zeroth.StepResult:
    engine.backward(engine(X, Y))
    return engine.step()


def load_batch() -> None:
    time.sleep(FAR)


def tokenize() -> None:
    while True:
        pass


def native_code() -> None:
    library = ctypes.PyDLL(None)  # a PyDLL keeps the GIL
    semaphore = ctypes.create_string_buffer(64)
    library.sem_init(semaphore, 0, 0)
    library.sem_wait(semaphore)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def export_alone(engine: zeroth.Engine) -> None:
    engine.export_safetensors(tempfile.gettempdir() + "/alone.safetensors")


def evaluate_alone(engine: zeroth.Engine) -> None:
    with torch.no_grad():
        engine(X, Y)


def average_alone(engine: zeroth.Engine) -> None:
    engine.average(1.0)


AVERAGES = {
    "all": ("the loss", "the accuracy"),
    "swap_averages": ("the accuracy", "the loss"),
    "skip_average": ("the accuracy",),
}
"""names of those that ranks make in a step, and what rank 1 makes of it"""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent() -> None:
    """What this rank has forked, as a data loader forks, lives on until the launcher has ended."""
    launcher = pathlib.Path("/proc", str(os.getppid()))
    if os.fork() == 0:
        os.closerange(0, 3)  # mpirun waits for the end of what a rank writes
        while launcher.exists():
            time.sleep(0.05)
        os._exit(0)
    kill()


def widen(world: zeroth.World, config: dict[str, object]) -> None:
    """Rank 1 has a wider head. The world is none the worse for it."""
    model: Any = zoo.make("plain")
    if world.rank == 1:
        model.head = nn.Linear(zoo.WIDTH, zoo.CLASSES + 1, dtype=torch.float64)
    try:
        zeroth.Engine(model, config, world=world, log_level="warning")
    except zeroth.Error as error:
        say(f"rank {world.rank} is told of widths: {error}")


def spoil(model: Any) -> None:
    """The next gradient of a weight."""

    def spoilt(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return gradient * float("nan")

    handle: torch.utils.hooks.RemovableHandle = model.blocks[1].linear.weight.register_hook(spoilt)


def leave_bias_out(model: Any) -> None:
    linear = model.blocks[1].linear
    linear.forward = lambda x: F.linear(x, linear.weight)


def abort(world: zeroth.World) -> None:
    """And stays: the others hear of it from no connection that ends."""
    world.abort("the data set has ended")
    time.sleep(8.0)
    os._exit(0)


def misbehave(how: str, engine: zeroth.Engine, model: nn.Module, world: zeroth.World) -> None:
    if how == "nothing":  # ZEROTH_FAULTS does it
        return
    if how in ("load_batch", "tokenize", "native_code", "stop", "kill", "kill_parent"):
        globals()[how]()
    elif how in ("leave", "leave_before_evaluation"):
        sys.exit(0)
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how in ("exit_code", "exit_text"):
        sys.exit(7 if how == "exit_code" else "bye")
    elif how == "caught":
        try:
            engine.optimizer.state_dict()
        except zeroth.Error:
            sys.exit(0)
    elif how == "abort":
        abort(world)
    elif how == "raise":
        raise ValueError("a mistake of the user's")
    elif how == "refuse":
        raise zeroth.make_error("USAGE", "the scale is not a number", where="train.py", hint="take one")
    elif how == "skip_step":
        engine.backward(engine(X, Y))
    elif how == "parameters":
        spoil(model)
    elif how not in AVERAGES:
        globals()[how](engine)


def main(how: str, transport: str, stage: str, timeout_ms: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if transport == "gloo":
        dist.init_process_group("gloo")
    world = zeroth.World.from_group() if transport == "gloo" else zeroth.World.from_environment()
    config: dict[str, object] = {
        "zero_optimization": {"stage": int(stage)},
        "zeroth": {
            "timeout_ms": int(timeout_ms),
            "first_timeout_ms": 60_000,  # of ranks that start, beside other jobs
            "frozen_after_ms": 2_000,
            "threads": 1,
            "ranks_per_node": 2 if transport == "shm+mpi" else 0,
        },
    }
    if how == "parameters":
        widen(world, config)
    model = zoo.make("plain")
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    begin = time.monotonic()
    try:
        for step in range(8):
            if step == 3:
                begin = time.monotonic()
                if how == "leave_before_evaluation" and world.rank != 1:
                    evaluate_alone(engine)
                if world.rank == 1:
                    misbehave(how, engine, model, world)
            if step == 5 and how == "parameters" and world.rank == 1:
                leave_bias_out(model)
            result = train(engine)
            if step == 3 and how in AVERAGES:
                for name in AVERAGES[how if world.rank == 1 else "all"]:
                    engine.average(1.0, name)
            if not result.committed:
                say(f"rank {world.rank} goes on: {result.reason}")
        say(f"rank {world.rank} has trained")
    except zeroth.Error as error:
        say(f"rank {world.rank} is told after {time.monotonic() - begin:.1f} s: {error}")
        say(f"rank {world.rank} knows {error.code} {error.rank} {error.step} {error.op}")
        time.sleep(1.0)  # the launcher ends the others soon after the first: each shall have spoken
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
