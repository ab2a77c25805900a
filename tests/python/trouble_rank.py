"""One rank of a job that goes wrong on purpose; see engine_test.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
import zoo

import zeroth

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])


def config(stage: int = 3) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage}, "zeroth": {"timeout_ms": 20_000}}


def train(engine: zeroth.Engine) -> None:
    engine.backward(engine(X, Y))
    engine.step()


def exception(rank: int) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config())
    for step in range(100):
        if rank == 1 and step == 3:
            raise ValueError("a mistake of the user's")
        train(engine)


def disagree(rank: int) -> None:
    try:
        zeroth.Engine(zoo.make("plain"), config(stage=rank))
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}", flush=True)
        time.sleep(1.0)  # the launcher ends the others soon after the first: each shall have spoken
        raise


def give_up(rank: int) -> None:
    world = zeroth.World.from_environment()
    engine = zeroth.Engine(zoo.make("plain"), config(), world=world)
    train(engine)
    if rank == 1:
        world.abort("the data has run out")
    try:
        train(engine)
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}", flush=True)


def kill(rank: int) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config())
    while True:
        train(engine)
        if rank == 1 and engine.steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def interrupt(rank: int, where: str) -> None:
    """Rank 1 does not come; rank 0 waits, gets SIGINT and must have a KeyboardInterrupt soon."""
    if rank == 1 and where == "construction":
        time.sleep(2.5)
        return
    model = zoo.make("plain")
    engine = None if rank == 0 and where == "construction" else zeroth.Engine(model, config())
    if engine is not None:
        train(engine)
    if rank == 1:
        if where == "backward":
            # A gradient that rank 0 waits for does not come: this rank stops after its forward.
            engine(X, Y)
        if where == "step":
            engine.backward(engine(X, Y))
        time.sleep(2.5)
        os._exit(0)
    sent = [0.0]

    def send() -> None:
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.7, send).start()
    try:
        if engine is None:
            zeroth.Engine(model, config())
        else:
            for _ in range(3):  # whichever wait comes first
                train(engine)
    except KeyboardInterrupt:
        taken = time.monotonic() - sent[0]
        print(f"KeyboardInterrupt after {taken:.3f} s", flush=True)
        if taken > 0.5:
            sys.exit("too late")
        return
    sys.exit("nothing interrupted the wait")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"exception": exception, "disagree": disagree, "give_up": give_up, "kill": kill, "interrupt": interrupt}[sys.argv[1]](
        zeroth.World.from_environment().rank, *sys.argv[2:]
    )
