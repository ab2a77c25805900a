"""One rank of a job that goes wrong on purpose; see endings_test.py."""

from __future__ import annotations

import ctypes
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


def gil(rank: int, hook: str) -> None:
    """A thread of rank 0 keeps the GIL for two seconds of a backward in which rank 1 needs rank 0. `hook`: one of the user's, in Python."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    engine = zeroth.Engine(model, config(), log_level="off")
    x = torch.randn(2048, 512)
    if hook == "python" and rank == 0:
        model[6].register_full_backward_hook(lambda *_: None)
    begun = threading.Event()

    def keep() -> None:
        begun.wait()
        ctypes.PyDLL(None).usleep(2_000_000)  # a PyDLL keeps the GIL

    if rank == 0:
        threading.Thread(target=keep).start()
    output = engine(x)
    loss = output.sum()
    gradient = torch.ones_like(loss)
    engine.average(0.0)
    begun.set()
    begin = time.monotonic()
    # loss.backward() without its lines in Python: the first to let the GIL go is torch's engine, when it begins. The graph is kept,
    # because torch takes the GIL to free what a graph has saved.
    torch.autograd.Variable._execution_engine.run_backward((loss,), (gradient,), True, False, (), allow_unreachable=True, accumulate_grad=True)
    if rank == 1:
        print(f"backward took {time.monotonic() - begin:.2f} s", flush=True)
    engine.step()


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
    {"exception": exception, "disagree": disagree, "gil": gil, "give_up": give_up, "kill": kill, "interrupt": interrupt}[sys.argv[1]](
        zeroth.World.from_environment().rank, *sys.argv[2:]
    )
