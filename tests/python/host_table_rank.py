"""One rank of two that share a HostTable, against one table with the batches of both; see host_table_test.py."""

from __future__ import annotations

import torch

import zeroth

R, D, STEPS = 40, 12, 5


def made(rule: str, group: zeroth.Communicator | None) -> zeroth.HostTable:
    values = torch.randn(R, D, generator=torch.Generator().manual_seed(1))
    return zeroth.HostTable(R, D, values=values, rule=rule, group=group)


def batch(step: int, rank: int) -> torch.Tensor:
    """Of different lengths; one rank has nothing in step 3."""
    size = 0 if step == 3 and rank == 1 else 5 + 4 * rank
    return torch.randint(0, R, (size,), generator=torch.Generator().manual_seed(10 * step + rank))


def backward(table: zeroth.HostTable, indices: torch.Tensor, factor: float) -> None:
    rows = table(indices)
    (rows.square() * factor).sum().backward()


def main() -> None:
    group = zeroth.World.from_environment().mesh({"dp": 2}).axis("dp")
    for rule in ("sgd", "rowwise_adagrad", "adam"):
        shared, alone = made(rule, group), made(rule, None)
        for step in range(STEPS):
            backward(shared, batch(step, group.rank), 1.0)
            touched = shared.step()
            backward(alone, torch.cat([batch(step, 0), batch(step, 1)]), 0.5)  # the mean over the ranks
            assert alone.step() == touched
            assert torch.equal(shared.values, alone.values), (rule, step)


main()
