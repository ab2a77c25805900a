"""One rank of two that share a HostTable, against one table with the batches of both; see host_table_test.py."""

from __future__ import annotations

import torch
from refusing import refused

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


def differing(what: str) -> None:
    """On all ranks alike, who can go on."""
    world = zeroth.World.from_environment()
    group = world.mesh({"dp": 2}).axis("dp")
    odd = world.rank == 1
    if what == "seeds":
        torch.manual_seed(world.rank)
        with refused(
            "MISMATCH", "^.MISMATCH. ranks have different host tables; .*who: rank 1/2 .*which: values; .*manual"
        ):
            zeroth.HostTable(R, D, group=group)
        with refused("USAGE", r"in a job of 2 ranks has no group; .*which: group;.*hint: zeroth.*mesh\(\{.dp.: 2\}\)"):
            zeroth.HostTable(R, D)
        assert not torch.equal(
            group.all_gather(zeroth.HostTable(R, D, group=None).values[:1]).diff(dim=0), torch.zeros(D)
        )
        with refused("MISMATCH", "which: rule; expected: sgd .rank 0.; got: adam .rank 1."):
            made("adam" if odd else "sgd", group)
    table = made("adam", group)
    if what == "rates":
        table.lr = 0.5 if odd else 0.25
        with refused("MISMATCH", r"which: lr, betas, eps; expected: lr 0.25, .*\(rank 0\); got: lr 0.5, .*\(rank 1\)"):
            table.step()
    if what == "states":
        state = {name: one.clone() for name, one in table.state_dict().items()}
        state["exp_avg"] += world.rank
        table.load_state_dict(state)
        with refused("MISMATCH", r"which: exp_avg, loaded; "):
            table.step()


def main() -> None:
    for what in ("seeds", "rates", "states"):
        differing(what)
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
