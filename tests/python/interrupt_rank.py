"""One rank of two. Rank 1 comes late to each call that waits for it; rank 0 gets SIGINT there, must have a
KeyboardInterrupt soon, and makes the call again; see endings_test.py. Arguments: a folder, and "group" for torch's gloo
group instead of shared memory, or "mpi" and the one call, for a rank that mpirun has started."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import forks
import torch
import torch.distributed as dist
import zoo

# Whichever thread imports the package, waits of the main thread end.
importing = threading.Thread(target=importlib.import_module, args=("zeroth",))
importing.start()
importing.join()
import zeroth  # noqa: E402

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
CONFIG = {"zero_optimization": {"stage": 3}, "zeroth": {"timeout_ms": 4_000, "first_timeout_ms": 60_000}}
WAITS_S = 0.3
"""who has been at one place for so long waits there"""


def send_when_it_waits(main: int, sent: list[float]) -> None:
    place, since = None, time.monotonic()
    while time.monotonic() - since < WAITS_S:
        frame = sys._current_frames()[main]
        if place != (frame.f_code, frame.f_lasti):
            place, since = (frame.f_code, frame.f_lasti), time.monotonic()
        time.sleep(0.02)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)


def interrupt(call: Callable[[], object]) -> str:
    """How long after SIGINT the call ended, and in which function of the engine it was."""
    sent: list[float] = []
    threading.Thread(target=send_when_it_waits, args=(threading.get_ident(), sent)).start()
    try:
        call()
    except KeyboardInterrupt as error:
        taken = time.monotonic() - sent[0]
        frames = [
            frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith("_engine.py")
        ]
        return f"KeyboardInterrupt after {taken:.3f} s in {frames[-1]}"
    raise AssertionError("nothing interrupted the wait")


def attempt(call: Callable[[], object]) -> str:
    try:
        return f"goes on: {call()}"
    except zeroth.Error as error:
        return f"is told: {error}"
    except KeyboardInterrupt:
        return "is told nothing: KeyboardInterrupt"


class Training:
    def __init__(self, rank: int, where: str) -> None:
        """The engine is built, unless that is to be interrupted."""
        folder = pathlib.Path(sys.argv[1])
        self.interrupted = folder / f"{where} was interrupted"
        self.exported = str(folder / "weights.safetensors")
        if sys.argv[2:] == ["group"]:
            dist.init_process_group("gloo", init_method=f"file://{folder}/{where}", rank=rank, world_size=2)
            self.world = zeroth.World.from_group()
        else:
            self.world = zeroth.World.from_environment()
        self.rank = rank
        self.model = zoo.make("plain")
        if where == "forward":
            self.model.register_buffer("shared", torch.zeros(3))  # rank 0's, at the start of each forward
        if where != "construction":
            self.build()
            self.train()

    def build(self) -> None:
        self.engine = zeroth.Engine(self.model, CONFIG, world=self.world, log_level="off")

    def forward(self) -> None:
        self.loss = self.engine(X, Y)

    def backward(self) -> None:
        self.engine.backward(self.loss)

    def step(self) -> zeroth.StepResult:
        return self.engine.step()

    def train(self) -> zeroth.StepResult:
        self.forward()
        self.backward()
        return self.step()


def interrupted(where: str, rank: int) -> None:
    training = Training(rank, where)
    calls: dict[str, Callable[[], object]] = {
        "construction": training.build,
        "forward": training.forward,
        "backward": training.backward,
        "step": training.step,
        "export": lambda: training.engine.export_safetensors(training.exported),
        "close": lambda: training.engine.close(),
    }
    if where in ("backward", "step"):
        training.forward()
    if where == "step":
        training.backward()
    call = calls[where]
    if rank == 0:
        print(f"{where}: {interrupt(call)}", flush=True)
        training.interrupted.touch()
    else:
        end = time.monotonic() + forks.LIMIT_S
        while not training.interrupted.exists() and time.monotonic() < end:
            time.sleep(0.01)
    if where == "backward":  # once more is one too often for its graph, but the step is skipped on both ranks
        if rank == 1:
            attempt(call)
        call = training.step
    told = attempt(call)
    print(f"{where}: rank {rank} {told}", flush=True)
    if where in ("construction", "backward") and told.startswith("goes on"):
        print(f"{where}: rank {rank} then {attempt(training.train)}", flush=True)


def opening(rank: int) -> None:
    """MPI's world is open once all ranks have come, and rank 1 does not."""
    if rank == 1:
        time.sleep(forks.LIMIT_S)
        return
    engine = functools.partial(
        zeroth.Engine, zoo.make("plain"), CONFIG, world=zeroth.World.from_environment(), log_level="off"
    )
    print(f"opening: {interrupt(engine)}", flush=True)
    print(f"opening: rank 0 ends at {time.time():.3f}", flush=True)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # it is ignored where a shell has started us in its background
    torch.set_num_threads(1)
    if sys.argv[2:] == ["mpi", "opening"]:
        opening(zeroth.World.from_environment().rank)
    elif sys.argv[2:3] == ["mpi"]:
        interrupted(sys.argv[3], zeroth.World.from_environment().rank)
    else:
        forks.run(
            {
                where: functools.partial(interrupted, where)
                for where in ("construction", "forward", "backward", "step", "export", "close")
            }
        )
