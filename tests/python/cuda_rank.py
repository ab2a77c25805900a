"""One rank of a job on a CUDA device; see cuda_test.py."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zoo
from safetensors.torch import load_file
from torch import nn

import zeroth

X, Y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])


def config(stage: int = 3) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zeroth": {"timeout_ms": 60_000},
    }


def device() -> str:
    return f"cuda:{zeroth.World.from_environment().local_rank % torch.cuda.device_count()}"


def train(engine: zeroth.Engine) -> float:
    loss = engine(X.to(device()), Y.to(device()))
    engine.backward(loss)
    assert engine.step().committed
    return float(loss.item())


def group(backend: str) -> None:
    """The losses of shared memory, over a group of torch's."""
    torch.cuda.set_device(device())
    dist.init_process_group(backend)
    losses = []
    for world in (zeroth.World.from_environment(), zeroth.World.from_group()):
        engine = zeroth.Engine(zoo.make("plain").to(device()), config(), world=world, log_level="off")
        losses.append([train(engine) for _ in range(4)])
        engine.close()
    assert losses[0] == losses[1], losses
    dist.destroy_process_group()


def mistakes() -> None:
    model = zoo.make("plain").to(device())
    engine = zeroth.Engine(model, config(), log_level="off")
    for input_, expected in ((X, "expected: cuda:0; got: cpu"), (X.to("meta"), "expected: cuda:0; got: meta")):
        try:
            engine(input_, Y.to(device()))
            raise AssertionError("an input on another device")
        except zeroth.Error as error:
            assert "input is on another device" in str(error) and expected in str(error), error
    train(engine)
    try:
        (model.first.weight + 1).sum().item()
        raise AssertionError("a parameter that is not gathered was read")
    except RuntimeError as error:
        assert "first.weight" in str(error) and "not gathered" in str(error), error
    half = zoo.make("plain")
    half.first.to(device())
    try:
        zeroth.Engine(half, config(), log_level="off")
        raise AssertionError("parameters on two devices")
    except zeroth.Error as error:
        assert "different devices" in str(error), error


def memory() -> None:
    for stage in (0, 3):
        model = zoo.make("plain").to(device())
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        engine = zeroth.Engine(model, config(stage), log_level="off")
        train(engine)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            train(engine)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before, "something grows"
        report = engine.memory_report()
        assert report.measured_peak == report.planned, report
        assert stage == 3 or report.compute_copies >= parameters, report
        engine.close()


class WithBuffer(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.net = zoo.make("plain")
        self.register_buffer("seen", torch.full((3,), float(rank)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x, y)
        return loss


def buffers() -> None:
    world = zeroth.World.from_environment()
    model = WithBuffer(world.rank).to(device())
    engine = zeroth.Engine(model, config(), world=world, log_level="off")
    loss = train(engine)
    assert model.seen.is_cuda and model.seen.tolist() == [0.0, 0.0, 0.0], model.seen
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "weights.safetensors"
        engine.export_safetensors(str(path))
        if world.rank == 0:
            plain = WithBuffer(0)
            plain.load_state_dict(load_file(path))
            assert plain(X, Y).item() < loss, "the exported weights are not the trained ones"
    engine.close()


def to_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: to_device(item) for key, item in value.items()}
    return tuple(map(to_device, value)) if isinstance(value, tuple) else value.to(device())


def rows(name: str, part: str) -> None:
    """The rows of a table of tensor_rank.py or pipe_rank.py, with the models and batches on the device."""
    program = importlib.import_module(name)
    made, batch, plain = program.made, program.batch, program.plain
    program.made = lambda *given, **more: made(*given, **more).to(device())
    program.batch = lambda *given: to_device(batch(*given))

    @functools.cache
    def plain_on_host(*given: Any) -> Any:
        losses, norms, weights = plain(*given)
        return losses, norms, {key: value.cpu() for key, value in weights.items()}

    program.plain = plain_on_host
    world = zeroth.World.from_environment()
    for row in program.TABLES[part]:
        program.check(row, world)


def shared_head() -> None:
    """Two stages that share the rows of a head, as pipe_head_rank.py has them."""
    program = importlib.import_module("pipe_head_rank")
    layers, batch, close = program.layers, program.batch, program.close
    program.layers = lambda **given: layers(**given).to(device())
    program.batch = lambda *given: to_device(batch(*given))
    program.close = lambda *given: close(*(torch.as_tensor(value).cpu() for value in given))
    program.two()


if __name__ == "__main__":
    torch.set_num_threads(1)
    calls: dict[str, Callable[..., None]] = {"group": group, "mistakes": mistakes, "memory": memory}
    calls |= {"buffers": buffers, "rows": rows, "shared_head": shared_head}
    calls[sys.argv[1]](*sys.argv[2:])
