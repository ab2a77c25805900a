"""One rank of two that makes the mistakes of refusals_test.py: both ranks do, then rank 1 alone. What needs no other
rank is refused where it happens, and training goes on with the same losses; what ends an engine ends it with an Error
on both ranks. Started by zeroth-run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator

import forks
import torch
import torch.distributed as dist
import zoo
from told import told
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeroth

LONG_MS, SHORT_MS = 20_000, 1_000
"""timeouts that must not pass, and that has to"""


def config(stage: int, timeout_ms: int = LONG_MS) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zeroth": {"timeout_ms": timeout_ms},
    }


@dataclasses.dataclass
class Training:
    """An engine, and what it is fed with."""

    world: zeroth.World
    stage: int

    def __post_init__(self) -> None:
        self.model = zoo.make("plain")
        self.engine = zeroth.Engine(self.model, config(self.stage), world=self.world, log_level="off")
        of_ranks = next(zoo.batches(self.world.size, 1, 1))[0]
        self.batch = of_ranks[self.world.rank]

    def step(self, in_the_middle: Callable[[], None] = lambda: None) -> str:
        """The loss, as bits."""
        loss = self.engine(*self.batch)
        self.engine.backward(loss)
        in_the_middle()
        assert self.engine.step().committed
        return loss.item().hex()


def refused(text: str, use: Callable[[], object], kind: type[Exception] = zeroth.Error) -> None:
    try:
        use()
    except kind as error:
        assert re.search(text, str(error), re.DOTALL), error
    else:
        raise AssertionError(f"not refused: {text}")


# --- refused where it happens
# --------------------------------------------------------------------------------------------


def foreign_step(training: Training) -> None:
    refused(
        "USAGE.*steps over parameters that an engine owns.*SGD",
        torch.optim.SGD(training.model.parameters(), lr=0.1).step,
    )


def second_engine(training: Training) -> None:
    refused(
        "USAGE.*in an engine already.*first.weight",
        lambda: zeroth.Engine(training.model, config(training.stage), log_level="off"),
    )


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Of torch.distributed, beside that of the launcher."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed_tensor(training: Training) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with world_of_one():
        model[1].weight = nn.Parameter(
            distribute_tensor(model[1].weight.data, init_device_mesh("cpu", (1,)), [Shard(0)])
        )
    refused(r"MODEL.*tensor subclass.*1\.weight", lambda: zeroth.Engine(model, world=training.world, log_level="off"))


def other_world(training: Training) -> None:
    with world_of_one():
        refused(
            "ENVIRONMENT.*different worlds.*rank 0 of 1.*rank [01] of 2",
            lambda: zeroth.Engine(nn.Linear(2, 2), log_level="off"),
        )


def on_another_device(training: Training) -> None:
    x, y = training.batch
    refused("USAGE.*another device.*input tensor 0.*meta", lambda: training.engine(x.to("meta"), y))


def sharded_state(training: Training) -> None:
    refused("USAGE.*sharded parameters has no state_dict", training.model.state_dict)


def not_gathered(training: Training) -> None:
    for use in (lambda: training.model.head.bias.sum(), training.model.float):
        refused(r"parameter '(head\.bias|first\.weight)' is not gathered", use, RuntimeError)


def clipping(training: Training) -> None:
    refused(
        r"gradient of 'first\.weight' is in the engine.*gradient_clipping",
        lambda: nn.utils.clip_grad_norm_(training.model.parameters(), 1.0),
        RuntimeError,
    )


def after_close(closed: Training) -> None:
    for use in (
        closed.step,
        lambda: closed.engine.step(),
        lambda: closed.engine.average(1.0),
        lambda: closed.engine.export_safetensors("x"),
    ):
        refused("USAGE.*the engine is closed", use)


MISTAKES = [foreign_step, second_engine, on_another_device, other_world, distributed_tensor]
WHEN_SHARDED = [sharded_state, not_gathered]


def goes_on(alone: bool, stage: int, rank: int) -> None:
    """Steps with a mistake before each, and in one of them, beside steps without."""
    world = zeroth.World.from_environment()
    mistakes = MISTAKES + (WHEN_SHARDED if stage == 3 else [])
    plain = Training(world, stage)
    expected = [plain.step() for _ in range(len(mistakes) + 3)]
    plain.engine.close()
    makes_them = rank == 1 or not alone
    training = Training(world, stage)
    losses = []
    for mistake in mistakes:
        if makes_them:
            mistake(training)
        losses.append(training.step())
    losses.append(training.step(functools.partial(clipping, training) if makes_them else lambda: None))
    failed_backward(training, makes_them)
    losses.append(training.step())
    if makes_them:
        after_close(plain)
    losses.append(training.step())
    assert losses == expected, (losses, expected)
    training.engine.close()


def failed_backward(training: Training, makes_it: bool) -> None:
    """The update is skipped on all ranks, and says why."""
    loss = training.engine(*training.batch)
    if makes_it:
        with compiled_autograd._enable(lambda graph: graph):
            refused("compiled autograd.*leave", lambda: training.engine.backward(loss), RuntimeError)
    else:
        training.engine.backward(loss)
    result = training.engine.step()
    assert not result.committed and re.fullmatch("backward failed on rank [01]", result.reason), result


# --- the end of an engine
# ------------------------------------------------------------------------------------------------


def cast(training: Training) -> None:
    for parameter in training.model.parameters():  # as model.float() does, where no guard of a gradient speaks first
        parameter.data = parameter.data.float()


def to_meta(training: Training) -> None:
    training.model.to("meta")


def replaced(training: Training) -> None:
    training.model.head.bias = nn.Parameter(torch.zeros(zoo.CLASSES, dtype=torch.float64))


def written(training: Training) -> None:
    """Where the gathered value is only a copy."""
    loss = training.engine(*training.batch)
    with torch.no_grad():
        training.model.head.bias.clamp_(-0.1, 0.1)
    training.engine.backward(loss)
    training.engine.step()


ENDS: dict[str, tuple[int, Callable[[Training], None]]] = {
    "cast": (0, cast),
    "meta at 0": (0, to_meta),
    "meta at 3": (3, to_meta),
    "replaced": (2, replaced),
    "written": (3, written),
}
"""with the stage"""


def ends(mistake: Callable[[Training], None], stage: int, alone: bool, name: str, rank: int) -> None:
    training = Training(zeroth.World.from_environment(), stage)
    training.step()

    def attempt() -> None:
        if rank == 1 or not alone:
            mistake(training)
        training.step()

    told(name, rank, attempt)


def other_size(alone: bool, name: str, rank: int) -> None:
    """The ranks say different numbers of ranks. None of them is wrong on its own."""
    if rank == 1 or not alone:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(3 + rank)
    told(name, rank, lambda: zeroth.Engine(zoo.make("plain"), config(3), log_level="off"))


def never_comes(name: str, rank: int) -> None:
    """Rank 1 is refused before it meets rank 0, which nobody but a launcher could tell."""
    with world_of_one() if rank == 1 else contextlib.nullcontext():
        told(name, rank, lambda: zeroth.Engine(zoo.make("plain"), config(3, SHORT_MS), log_level="off"))


def cases() -> Iterator[tuple[str, Callable[[int], None]]]:
    for alone in (False, True):
        who = "rank 1" if alone else "both"
        for stage in (0, 3):
            yield f"stage {stage}, {who}", functools.partial(goes_on, alone, stage)
        for name, (stage, mistake) in ENDS.items():
            yield f"{name}, {who}", functools.partial(ends, mistake, stage, alone, f"{name}, {who}")
        yield f"size, {who}", functools.partial(other_size, alone, f"size, {who}")
    yield "world, rank 1", functools.partial(never_comes, "world, rank 1")


if __name__ == "__main__":
    torch.set_num_threads(1)
    forks.run(dict(cases()))
