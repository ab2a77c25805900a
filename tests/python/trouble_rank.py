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


def train(engine: zeroth.Engine) -> zeroth.StepResult:
    engine.backward(engine(X, Y))
    return engine.step()


def exception(rank: int) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config())
    for step in range(100):
        if rank == 1 and step == 3:
            raise ValueError("a mistake of the user's")
        train(engine)


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rank == 1 and index == 5:
            raise OSError(f"cannot read sample {index}")
        return X[0], Y[0]


def loader(rank: int) -> None:
    """The batches of rank 1 come from a process that cannot read one of them."""
    engine = zeroth.Engine(zoo.make("plain"), config())
    try:
        for batch in torch.utils.data.DataLoader(Samples(rank), batch_size=2, num_workers=rank):
            engine.backward(engine(*batch))
            engine.step()
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}", flush=True)
        raise


def handler(rank: int) -> None:
    """A signal handler raises while rank 1 waits for rank 0, as torch's does where a DataLoader's worker died."""

    def gone(*_: object) -> None:
        raise RuntimeError("a worker is gone")

    engine = zeroth.Engine(zoo.make("plain"), config())
    train(engine)
    try:
        if rank == 1:
            signal.signal(signal.SIGALRM, gone)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
        else:
            time.sleep(1.0)
        engine.average(1.0)
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}", flush=True)
    except RuntimeError:
        time.sleep(2.0)


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
    """A thread of rank 0 keeps the GIL for two seconds of a backward in which rank 1 needs rank 0. `hook`: one of the
    user's, in Python."""
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
    # loss.backward() without its lines in Python: the first to let the GIL go is torch's engine, when it begins. The
    # graph is kept, because torch takes the GIL to free what a graph has saved.
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (gradient,), True, False, (), allow_unreachable=True, accumulate_grad=True
    )
    if rank == 1:
        print(f"backward took {time.monotonic() - begin:.2f} s", flush=True)
    engine.step()


def never(rank: int, how: str) -> None:
    """Rank 1 ends before it builds an engine. "group": torch's group is made, as on several hosts."""
    if how == "group":
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    if rank == 1:
        sys.exit(0)
    begin = time.monotonic()
    try:
        zeroth.Engine(zoo.make("plain"), config())
    except zeroth.Error as error:
        print(f"rank {rank} is told after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        raise


def torch_inside(rank: int) -> None:
    """An error of rank 1, where torch has set its hook of exceptions after the engine's; before and after a step."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    engine = zeroth.Engine(zoo.make("plain"), config())
    torch.distributed.init_process_group("gloo") if not torch.distributed.is_initialized() else None
    for step in range(100):
        if rank == 1 and step == 1:
            zeroth.Engine(zoo.make("plain"), {"optimizer": {"type": "Adm"}})
        train(engine)


def resumed(rank: int, folder: str) -> None:
    """Rank 1 leaves two steps after a checkpoint of step 3."""
    engine = zeroth.Engine(zoo.make("plain"), config())
    for _ in range(3):
        train(engine)
    engine.save(folder)
    engine.close()
    engine = zeroth.Engine(zoo.make("plain"), config())
    engine.load(folder)
    for _ in range(2):
        train(engine)
    if rank == 1:
        sys.exit(0)
    try:
        train(engine)
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}; engine.steps {engine.steps}, error.step {error.step}", flush=True)
        raise


def barriers(rank: int, how: str) -> None:
    """Ranks make different calls."""
    engine = zeroth.Engine(zoo.make("plain"), config(0 if how == "step" else 3))
    train(engine)
    try:
        if rank == 1 and how == "step":
            train(engine)
        else:
            engine.barrier(f"name of {rank}")
    except zeroth.Error as error:
        print(f"rank {rank} is told: {error}", flush=True)
        time.sleep(1.0)  # the launcher ends the others soon after the first: each shall have spoken
        raise


def kill(rank: int) -> None:
    engine = zeroth.Engine(zoo.make("plain"), config())
    while True:
        train(engine)
        if rank == 1 and engine.steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def preempt(rank: int) -> None:
    """Rank 1 gets SIGTERM; all ranks hear of it at one step, and make room."""
    engine = zeroth.Engine(zoo.make("plain"), config() | {"zeroth": {"timeout_ms": 20_000, "preemption": True}})
    for step in range(1000):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        engine.backward(engine(X, Y))
        if engine.step().preempted:
            print(f"rank {rank} makes room after step {engine.steps}", flush=True)
            sys.exit(zeroth.EXIT_PREEMPTED)


def make_room(rank: int) -> None:
    """Until SIGTERM comes; then rank 0 saves, and takes its time."""
    engine = zeroth.Engine(zoo.make("plain"), config() | {"zeroth": {"timeout_ms": 20_000, "preemption": True}})
    while True:
        engine.backward(engine(X, Y))
        if engine.step().preempted:
            if rank == 0:
                time.sleep(4)
            print(f"rank {rank} makes room after step {engine.steps}", flush=True)
            sys.exit(zeroth.EXIT_PREEMPTED)
        if engine.steps == 3:
            print("trains", flush=True)


def save_at_ctrl_c(rank: int, folder: str) -> None:
    """Until Ctrl-C comes, wherever the ranks are in a step; then they save, which takes longer than a Ctrl-C leaves."""
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    engine = zeroth.Engine(zoo.make("plain"), config() | {"zeroth": {"timeout_ms": 20_000, "preemption": True}})
    while True:
        time.sleep(0.02 * rank)  # rank 0 waits in its step
        engine.backward(engine(X, Y))
        if engine.step().preempted:
            time.sleep(2.5)
            path = engine.save(folder)
            print(f"rank {rank} saved step {engine.steps} as {os.path.basename(path)}", flush=True)
            sys.exit(zeroth.EXIT_PREEMPTED)
        if engine.steps == 3:
            print("trains", flush=True)


def slow(rank: int) -> None:
    """Rank 1 takes longer for its batches from step 30 on."""
    engine = zeroth.Engine(zoo.make("plain"), config(), log_level="warning")
    for step in range(60):
        time.sleep(0.05 if rank == 1 and step >= 30 else 0.02)
        times = train(engine).times
        if step > 30:
            assert [19_000 < of.between_us < 500_000 for of in times] == [True] * 3, times[0].between_us
            assert (
                times[1].computed_us >= 50_000 and times[1].computed_us >= times[1].between_us + times[1].forward_us
            ), times[1].computed_us
        if rank == 0 and step == 29:
            print("slow from here", file=sys.stderr, flush=True)


def forever(rank: int) -> None:
    """Until a signal comes."""
    engine = zeroth.Engine(zoo.make("plain"), config())
    while True:
        train(engine)
        if engine.steps == 3:
            print("trains", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "exception": exception,
        "loader": loader,
        "handler": handler,
        "disagree": disagree,
        "gil": gil,
        "never": never,
        "torch_inside": torch_inside,
        "resumed": resumed,
        "barriers": barriers,
        "give_up": give_up,
        "kill": kill,
        "forever": forever,
        "preempt": preempt,
        "make_room": make_room,
        "save_at_ctrl_c": save_at_ctrl_c,
        "slow": slow,
    }[sys.argv[1]](zeroth.World.from_environment().rank, *sys.argv[2:])
