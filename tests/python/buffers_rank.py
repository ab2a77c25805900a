"""One rank of three: buffers are rank 0's at the start of each forward in training, as in torch's
DistributedDataParallel, and nobody else's forwards wait for anybody.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroth

STEPS = 3
LR = 0.1
TOLERANCE = 1e-12

Values = list[torch.Tensor]


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


def make(rank: int) -> nn.Module:
    """Other weights on every rank."""
    torch.manual_seed(rank)
    return nn.Sequential(Block(), Block()).double()


def values(model: nn.Module) -> Values:
    return [buffer.detach().clone() for buffer in model.buffers()]


def train(
    model: nn.Module,
    rank: int,
    forward: Callable[[torch.Tensor], torch.Tensor],
    update: Callable[[torch.Tensor], None],
    alone: Callable[[int], None] = lambda step: None,
) -> tuple[list[Values], list[Values], list[float]]:
    """For each step: this rank's buffers before the forward; those with which the forward begins; the loss. Data and
    buffers are others on every rank."""
    data = torch.Generator().manual_seed(rank)
    before, within, losses = [], [], []
    for step in range(STEPS):
        alone(step)
        for buffer in model.buffers():
            buffer.add_(rank)
        before.append(values(model))
        handle = next(model.children()).register_forward_pre_hook(lambda module, args: within.append(values(model)))
        loss = forward(torch.randn(5, 4, generator=data, dtype=torch.float64)).square().mean()
        handle.remove()
        losses.append(loss.item())
        update(loss)
    return before, within, losses


def of_rank_0(before: list[Values]) -> list[Values]:
    """What rank 0 had, on every rank."""
    sent = [before]
    dist.broadcast_object_list(sent, src=0)
    for mine, theirs in zip(before, sent[0], strict=True):
        same = [torch.equal(one, other) for one, other in zip(mine, theirs, strict=True) if one.numel() > 0]
        assert all(same) if dist.get_rank() == 0 else not any(same), "the test means ranks that differ"
    return sent[0]


def require_equal(mine: list[Values], expected: list[Values], what: str, tolerance: float = 0.0) -> None:
    for step, (some, others) in enumerate(zip(mine, expected, strict=True)):
        for one, other in zip(some, others, strict=True):
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}, step {step}: {text}"
            )  # noqa: B023


def trained_by_torch(rank: int) -> tuple[list[Values], list[float], Values]:
    """Buffers at the start of each forward, losses, parameters."""
    model = make(rank)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    before, within, losses = train(model, rank, parallel, update)
    require_equal(within, of_rank_0(before), "torch")
    return within, losses, [parameter.detach() for parameter in model.parameters()]


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


def share(world: zeroth.World) -> None:
    of_torch, losses_of_torch, parameters_of_torch = trained_by_torch(world.rank)
    for stage in (0, 3):
        for shared in (True, False):
            model = make(world.rank)
            config = {
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "SGD", "params": {"lr": LR}},
                "zeroth": {"broadcast_buffers": shared, "timeout_ms": 20_000},
            }
            engine = zeroth.Engine(model, config, world=world, log_level="off")

            def update(loss: torch.Tensor) -> None:
                engine.backward(loss)  # noqa: B023
                assert engine.step().committed  # noqa: B023

            def alone(step: int) -> None:
                """What one rank does alone waits for nobody."""
                if step == 1 and world.rank == 1:
                    for training in (True, False):
                        with torch.no_grad():
                            engine.train(training)(torch.ones(5, 4, dtype=torch.float64))  # noqa: B023
                    engine.train()  # noqa: B023

            before, within, losses = train(model, world.rank, engine, update, alone)
            what = f"rank {world.rank}, stage {stage}, shared {shared}"
            require_equal(within, of_rank_0(before) if shared else before, what)
            engine.close()
            if shared:
                require_equal(within, of_torch, f"{what}, beside torch", TOLERANCE)
                assert all(
                    abs(mine - theirs) <= TOLERANCE for mine, theirs in zip(losses, losses_of_torch, strict=True)
                ), (what, losses)
                require_equal(
                    [[parameter.detach() for parameter in model.parameters()]], [parameters_of_torch], what, TOLERANCE
                )


def main() -> None:
    dist.init_process_group("gloo")
    world = zeroth.World.from_environment()
    refuse_sparse(world)
    keep_what_graphs_hold(world)
    refuse_other_sizes(world)
    share(world)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
