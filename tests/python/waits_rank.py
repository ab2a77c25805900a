"""One rank of a job in which rank 1 keeps the others waiting, one way or another; see waits_test.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import zoo

import zeroth

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
FAR = 600.0


def train(engine: zeroth.Engine) -> None:
    engine.backward(engine(X, Y))
    engine.step()


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


def misbehave(how: str, engine: zeroth.Engine) -> None:
    if how in ("load_batch", "tokenize", "native_code", "stop"):
        globals()[how]()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "leave":
        sys.exit(0)
    elif how == "raise":
        raise ValueError("a mistake of the user's")
    elif how == "skip_step":
        engine.backward(engine(X, Y))
    else:
        globals()[how](engine)


def main(how: str, transport: str, stage: str, timeout_ms: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if transport == "gloo":
        dist.init_process_group("gloo")
    world = zeroth.World.from_group() if transport == "gloo" else zeroth.World.from_environment()
    config = {
        "zero_optimization": {"stage": int(stage)},
        "zeroth": {"timeout_ms": int(timeout_ms), "frozen_after_ms": 2_000, "threads": 1},
    }
    engine = zeroth.Engine(zoo.make("plain"), config, world=world, log_level="warning")
    begin = time.monotonic()
    try:
        for step in range(8):
            if step == 3:
                begin = time.monotonic()
                if world.rank == 1:
                    misbehave(how, engine)
            train(engine)
        print(f"rank {world.rank} has trained", flush=True)
    except zeroth.Error as error:
        print(f"rank {world.rank} is told after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        time.sleep(1.0)  # the launcher ends the others soon after the first: each shall have spoken
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
