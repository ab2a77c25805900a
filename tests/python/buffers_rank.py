"""One rank of three: buffers are rank 0's at the start of each forward in training, and nobody else's forwards wait for anybody."""

from __future__ import annotations

import torch
from torch import nn

import zeroth


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.zeros(3, 2).t())
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()  # another tensor each time
        return x + self.norm(self.linear(x))


def state(model: nn.Module) -> list[float]:
    return [buffer.double().sum().item() for buffer in model.buffers()]


def refuse_sparse(world: zeroth.World) -> None:
    """Before anything is taken from the module."""
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    before = model.weight.detach().clone()
    try:
        zeroth.Engine(model, world=world, log_level="off")
    except zeroth.Error as error:
        assert error.code == "MODEL" and error.which == "graph", error
    else:
        raise AssertionError("a sparse buffer was taken")
    assert torch.equal(model.weight, before)


def keep_what_graphs_hold(world: zeroth.World) -> None:
    """A second forward before the backward brings rank 0's buffers, but not into the tensors of the first."""
    model = Block()
    engine = zeroth.Engine(model, world=world, log_level="off")
    torch.manual_seed(world.rank)
    engine(torch.randn(5, 4))
    first = model.mean
    before = first.clone()
    engine(torch.randn(5, 4))
    assert torch.equal(first, before)
    engine.close()


def refuse_other_sizes(world: zeroth.World) -> None:
    model = Block()
    engine = zeroth.Engine(model, world=world, log_level="off")
    model.mean = torch.zeros(world.rank % 2 + 1)
    try:
        engine(torch.randn(5, 4))
    except zeroth.Error as error:
        assert error.code == "MISMATCH" and error.which.startswith("mean "), error
    else:
        raise AssertionError("buffers of other sizes were shared")
    engine.close(keep_parameters=False)


def main() -> None:
    world = zeroth.World.from_environment()
    refuse_sparse(world)
    keep_what_graphs_hold(world)
    refuse_other_sizes(world)
    for stage in (0, 3):
        for shared in (True, False):
            torch.manual_seed(world.rank)  # other weights and data on every rank
            model = nn.Sequential(Block(), Block())
            engine = zeroth.Engine(model, {"zero_optimization": {"stage": stage}, "zeroth": {"broadcast_buffers": shared, "timeout_ms": 20_000}},
                                   world=world, log_level="off")
            at_start: list[list[float]] = []
            model[0].register_forward_pre_hook(lambda module, args: at_start.append(state(model)))
            for step in range(3):
                if world.rank == 1 and step == 1:  # what one rank does alone waits for nobody
                    with torch.no_grad():
                        engine(torch.randn(5, 4))
                    engine.eval()
                    with torch.no_grad():
                        engine(torch.randn(5, 4))
                    engine.train()
                    at_start.clear()
                if world.rank != 1 and step == 1:
                    at_start.clear()
                engine.backward(engine(torch.randn(5, 4)).square().mean())
                assert engine.step().committed
            assert len(at_start) == 2
            means = [[engine.average(value) for value in values] for values in at_start]
            equal = all(abs(mean - value) < 1e-12 * max(1.0, abs(value)) for of, to in zip(means, at_start) for mean, value in zip(of, to))
            anywhere = engine.average(float(equal))
            assert anywhere == 1.0 if shared else anywhere < 1.0, (stage, shared, at_start, means)
            engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
